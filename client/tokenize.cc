// qwend-client tokenize and detokenize.

#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"
#include "qwend/v1/inference.grpc.pb.h"

namespace qwend::client {
namespace {

std::string TextOrStdin(const std::string& argument) {
  if (argument != "-") return argument;
  return std::string(std::istreambuf_iterator<char>(std::cin), {});
}

}  // namespace

int Tokenize(const Options& options) {
  if (options.arguments.size() != 1) {
    PrintError("tokenize: give one text in quotes, or - to read it from standard input");
    return kUsage;
  }
  v1::TokenizeRequest request;
  request.set_parse_special(options.generation.parse_special);
  const std::string text = TextOrStdin(options.arguments[0]);
  // Unlike in generate, plain text is the usual case here; a system message asks for a chat.
  if (options.generation.system.empty()) {
    request.set_text(text);
  } else {
    v1::Message* system = request.mutable_chat()->add_messages();
    system->set_role("system");
    system->set_content(options.generation.system);
    v1::Message* user = request.mutable_chat()->add_messages();
    user->set_role("user");
    user->set_content(text);
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  grpc::ClientContext context;
  Prepare(options.connection, &context);
  v1::TokenizeResponse response;
  const grpc::Status status =
      v1::Inference::NewStub(channel)->Tokenize(&context, request, &response);
  if (!status.ok()) {
    PrintStatus(status);
    return kFailed;
  }
  if (options.json) return Write(JsonLine(response)) ? kOk : kClosedPipe;
  std::string out;
  for (int i = 0; i < response.ids_size(); ++i) {
    const std::string piece = i < response.pieces_size() ? response.pieces(i) : "";
    absl::StrAppend(&out, response.ids(i), "\t\"", absl::Utf8SafeCEscape(piece), "\"\n");
  }
  return Write(out) ? kOk : kClosedPipe;
}

int Detokenize(const Options& options) {
  v1::DetokenizeRequest request;
  request.set_skip_special_tokens(!options.generation.show_special);
  for (const std::string& argument : options.arguments) {
    for (absl::string_view word :
         absl::StrSplit(TextOrStdin(argument), absl::ByAnyChar(", \t\r\n"), absl::SkipEmpty())) {
      uint32_t id = 0;
      if (!absl::SimpleAtoi(word, &id)) {
        PrintError(absl::StrCat("detokenize: '", word, "' is not a token id"));
        return kUsage;
      }
      request.add_ids(id);
    }
  }
  if (request.ids().empty()) {
    PrintError("detokenize: give token ids, with spaces or commas, or - for standard input");
    return kUsage;
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  grpc::ClientContext context;
  Prepare(options.connection, &context);
  v1::DetokenizeResponse response;
  const grpc::Status status =
      v1::Inference::NewStub(channel)->Detokenize(&context, request, &response);
  if (!status.ok()) {
    PrintStatus(status);
    return kFailed;
  }
  return Write(options.json ? JsonLine(response) : response.text() + "\n") ? kOk : kClosedPipe;
}

}  // namespace qwend::client
