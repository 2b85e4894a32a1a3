// qwend-client chat: a conversation on the terminal, or line by line from a pipe.

#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "client/answer.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"

namespace qwend::client {
namespace {

constexpr char kHelp[] =
    "/system TEXT  set the system message and start over\n"
    "/reset        forget the conversation, keep the system message\n"
    "/exit         leave (so does Ctrl-D)\n"
    "A line that ends with \\ goes on with the next one. Ctrl-C stops the running answer.\n";

class Conversation {
 public:
  explicit Conversation(std::string system) { Restart(std::move(system)); }

  void Restart(std::string system) {
    system_ = std::move(system);
    chat_.clear_messages();
    if (!system_.empty()) Add("system", system_);
  }
  void Reset() { Restart(system_); }
  void Add(const std::string& role, const std::string& content) {
    v1::Message* message = chat_.add_messages();
    message->set_role(role);
    message->set_content(content);
  }
  void DropLast() { chat_.mutable_messages()->RemoveLast(); }
  v1::Chat& chat() { return chat_; }

 private:
  std::string system_;
  v1::Chat chat_;
};

// One turn of the user, continuation lines joined. False at the end of the input.
bool ReadTurn(const Palette& palette, bool terminal, std::string* turn) {
  turn->clear();
  std::string line;
  for (const char* prompt = "> ";; prompt = ". ") {
    if (terminal) fprintf(stderr, "%s%s%s", palette.bold.c_str(), prompt, palette.reset.c_str());
    if (!std::getline(std::cin, line)) return !turn->empty();
    if (!absl::EndsWith(line, "\\")) {
      *turn += line;
      return true;
    }
    line.back() = '\n';
    *turn += line;
  }
}

}  // namespace

int Chat(const Options& options) {
  const GenerationOptions& g = options.generation;
  if (!options.arguments.empty() || g.raw || g.prompt || g.num_outputs > 1) {
    PrintError("chat takes no prompt and neither --raw, --token_ids nor several outputs");
    return kUsage;
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  auto stub = v1::Inference::NewStub(channel);
  const bool terminal = IsTerminal(STDIN_FILENO) && IsTerminal(STDERR_FILENO);
  const Palette palette(STDERR_FILENO, options.color);
  Conversation conversation(g.system);
  int exit_code = kOk;

  if (terminal)
    fprintf(stderr, "%s/help lists the commands%s\n", palette.dim.c_str(), palette.reset.c_str());
  for (std::string turn; ReadTurn(palette, terminal, &turn);) {
    const std::string text(absl::StripAsciiWhitespace(turn));
    absl::string_view rest = text;
    if (text.empty()) continue;
    if (text == "/exit" || text == "/quit") break;
    if (text == "/reset") {
      conversation.Reset();
    } else if (text == "/system" || absl::ConsumePrefix(&rest, "/system ")) {
      conversation.Restart(text == "/system" ? "" : std::string(absl::StripAsciiWhitespace(rest)));
    } else if (text[0] == '/') {
      fprintf(stderr, "%s", kHelp);
    } else {
      conversation.Add("user", text);
      v1::GenerateRequest request;
      FillRequest(g, &request);
      *request.mutable_chat() = conversation.chat();
      if (g.enable_thinking) request.mutable_chat()->set_enable_thinking(*g.enable_thinking);
      const Answer answer = StreamAnswer(*stub, options, request);
      const int code = Conclude(*stub, options, answer);
      if (code == kClosedPipe) return code;
      // What was said before a Ctrl-C stays said; a turn that got no answer is taken back.
      if (code == kOk || !answer.text.empty()) {
        conversation.Add("assistant", answer.text);
      } else {
        conversation.DropLast();
      }
      if (code == kFailed) exit_code = kFailed;
    }
  }
  if (terminal) fprintf(stderr, "\n");
  return terminal ? kOk : exit_code;
}

}  // namespace qwend::client
