// A chat template of any bytes, rendered over a conversation with tools. What stands behind the
// first zero byte, when it is JSON, takes the place of the messages.
#include <cstdint>
#include <string>

#include "engine/tokenizer/chat_template.h"
#include "tests/fuzz/check.h"

namespace {

using Json = nlohmann::ordered_json;
using qwend::fuzz::Check;

qwend::ChatInput Conversation() {
  qwend::ChatInput input;
  input.messages = Json::parse(R"([
      {"role": "system", "content": "S \u00e9"},
      {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]},
      {"role": "assistant", "content": "<think>x</think>a", "tool_calls": [
          {"function": {"name": "f", "arguments": {"a": 1, "b": [1.5, null, true]}}}]},
      {"role": "tool", "content": "r"}, {"role": "user", "content": " z \n"}])");
  input.tools = Json::parse(R"([{"type": "function", "function": {"name": "f"}}])");
  input.bos_token = "<s>";
  input.enable_thinking = true;
  return input;
}

bool IsExplainedRefusal(const absl::Status& status) {
  return status.code() == absl::StatusCode::kInvalidArgument && !status.message().empty();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const size_t zero = bytes.find('\0');
  qwend::ChatInput input = Conversation();
  if (zero != std::string::npos) {
    Json messages = Json::parse(bytes.substr(zero + 1), nullptr, /*allow_exceptions=*/false);
    if (!messages.is_discarded()) input.messages = std::move(messages);
  }
  const auto parsed = qwend::ChatTemplate::Parse(bytes.substr(0, zero));
  if (!parsed.ok()) {
    Check(IsExplainedRefusal(parsed.status()), "a bad template is INVALID_ARGUMENT with a reason");
    return 0;
  }
  const auto text = (*parsed)->Render(input);
  if (!text.ok()) {
    Check(text.status().code() == absl::StatusCode::kInvalidArgument, "the status of an error");
    return 0;
  }
  Check(text->size() <= 16u << 20, "the bound of the output");
  if (bytes.find("strftime_now") == std::string::npos) {
    const auto again = (*parsed)->Render(input);
    Check(again.ok() && *again == *text, "a second rendering is the same");
  }
  return 0;
}
