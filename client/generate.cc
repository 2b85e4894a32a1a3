// qwend-client generate: one prompt, one answer.

#include <iostream>
#include <iterator>
#include <string>

#include "client/answer.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"

namespace qwend::client {

int Generate(const Options& options) {
  const GenerationOptions& g = options.generation;
  if (options.arguments.size() != (g.prompt ? 0u : 1u)) {
    PrintError(g.prompt
                   ? "generate: --token_ids is the prompt; give no other"
                   : "generate: give one prompt in quotes, or - to read it from standard input");
    return kUsage;
  }
  v1::GenerateRequest request;
  FillRequest(g, &request);
  if (g.prompt) {
    request.mutable_token_ids()->mutable_ids()->Assign(g.prompt->begin(), g.prompt->end());
  } else {
    std::string prompt = options.arguments[0];
    if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
    if (g.raw) {
      request.set_text(prompt);
    } else {
      v1::Chat* chat = request.mutable_chat();
      if (g.enable_thinking) chat->set_enable_thinking(*g.enable_thinking);
      if (!g.system.empty()) {
        v1::Message* system = chat->add_messages();
        system->set_role("system");
        system->set_content(g.system);
      }
      v1::Message* user = chat->add_messages();
      user->set_role("user");
      user->set_content(prompt);
    }
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  auto stub = v1::Inference::NewStub(channel);
  const Answer answer = StreamAnswer(*stub, options, request);
  return Conclude(*stub, options, answer);
}

}  // namespace qwend::client
