#include "server/chat_input.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

namespace qwend {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxJsonDepth = 64;
constexpr size_t kMaxTemplateMessageBytes = 400;

int NestingDepth(const std::string& text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

// At most `limit` bytes, cut between characters.
std::string Shortened(absl::string_view text, size_t limit) {
  if (text.size() <= limit) return std::string(text);
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) --limit;
  return absl::StrCat(text.substr(0, limit), "...");
}

// Callers write a call's arguments as OpenAI does, as JSON in a string; templates want the mapping.
void ParseArguments(Json* call, const std::string& field, Violations* violations) {
  if (!call->is_object()) {
    violations->Add(field, "must be a JSON object, such as {\"function\": {\"name\": ...}}");
    return;
  }
  Json* function = call;
  if (auto it = call->find("function"); it != call->end()) {
    if (!it->is_object()) {
      violations->Add(absl::StrCat(field, ".function"), "must be a JSON object");
      return;
    }
    function = &*it;
  }
  if (auto name = function->find("name"); name == function->end() || !name->is_string()) {
    violations->Add(absl::StrCat(field, ".name"), "every call names its function, as a string");
  }
  auto arguments = function->find("arguments");
  if (arguments == function->end()) return;
  if (arguments->is_string()) {
    auto parsed = ParseCallerJson(arguments->get<std::string>());
    if (!parsed.ok()) {
      violations->Add(absl::StrCat(field, ".arguments"), std::string(parsed.status().message()));
      return;
    }
    *arguments = *std::move(parsed);
  }
  if (!arguments->is_object()) {
    violations->Add(absl::StrCat(field, ".arguments"),
                    "must be a JSON object, or a string that holds one");
  }
}

Json ToolCalls(const std::string& text, const std::string& field, Violations* violations) {
  auto calls = ParseCallerJson(text);
  if (!calls.ok()) {
    violations->Add(field, std::string(calls.status().message()));
    return nullptr;
  }
  if (!calls->is_array()) {
    violations->Add(field, "must be a JSON array of tool calls");
    return nullptr;
  }
  for (size_t i = 0; i < calls->size(); ++i) {
    ParseArguments(&(*calls)[i], absl::StrCat(field, "[", i, "]"), violations);
  }
  return *std::move(calls);
}

Json MessageInput(const v1::Message& message, const std::string& field, Violations* violations) {
  const std::string& role = message.role();
  if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
    violations->Add(
        absl::StrCat(field, ".role"),
        absl::StrCat(role.empty() ? "missing" : absl::StrCat(Quoted(role), " is unknown"),
                     "; give system, user, assistant or tool"));
  }
  Json out = {{"role", role}, {"content", message.content()}};
  if (message.has_reasoning_content()) {
    out["reasoning_content"] = message.reasoning_content();
    if (role != "assistant") {
      violations->Add(absl::StrCat(field, ".reasoning_content"),
                      "only an assistant's turn has reasoning");
    }
  }
  if (!message.tool_calls_json().empty()) {
    const std::string calls_field = absl::StrCat(field, ".tool_calls_json");
    if (role != "assistant") {
      violations->Add(calls_field, "only an assistant's turn has tool calls");
    }
    out["tool_calls"] = ToolCalls(message.tool_calls_json(), calls_field, violations);
  }
  return out;
}

ChatInput BuildInput(const v1::Chat& chat, Violations* violations) {
  ChatInput input;
  if (chat.messages().empty()) {
    violations->Add("chat.messages", "empty; a chat has at least one message");
  }
  for (int i = 0; i < chat.messages_size(); ++i) {
    input.messages.push_back(
        MessageInput(chat.messages(i), absl::StrCat("chat.messages[", i, "]"), violations));
  }
  for (int i = 0; i < chat.tools_json_size(); ++i) {
    const std::string field = absl::StrCat("chat.tools_json[", i, "]");
    auto tool = ParseCallerJson(chat.tools_json(i));
    if (!tool.ok()) {
      violations->Add(field, std::string(tool.status().message()));
    } else if (!tool->is_object()) {
      violations->Add(field, "must be a JSON object, the definition of one function");
    } else {
      input.tools.push_back(*std::move(tool));
    }
  }
  input.add_generation_prompt = !chat.omit_generation_prompt();
  if (chat.has_enable_thinking()) input.enable_thinking = chat.enable_thinking();
  return input;
}

}  // namespace

absl::StatusOr<Json> ParseCallerJson(const std::string& text) {
  if (NestingDepth(text) > kMaxJsonDepth) {
    return absl::InvalidArgumentError(
        absl::StrCat("JSON nested more than ", kMaxJsonDepth, " deep"));
  }
  Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", Quoted(text)));
  }
  return value;
}

absl::Status RequireChat(const ModelView& model) {
  if (model.tokenizer == nullptr) {
    return absl::FailedPreconditionError(
        "chat: this model folder has no tokenizer.json; send token_ids");
  }
  if (model.chat_template == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("chat: ", model.chat_template_status.message()));
  }
  return absl::OkStatus();
}

void CheckChat(const v1::Chat& chat, Violations* violations) { BuildInput(chat, violations); }

std::string RenderChat(const v1::Chat& chat, const ModelView& model, Violations* violations) {
  const size_t before = violations->size();
  ChatInput input = BuildInput(chat, violations);
  if (violations->size() != before) return "";
  input.bos_token = model.tokenizer->bos_token();
  input.eos_token = model.tokenizer->eos_token();
  auto text = model.chat_template->Render(input);
  if (!text.ok()) {
    violations->Add("chat", Shortened(text.status().message(), kMaxTemplateMessageBytes));
    return "";
  }
  return *std::move(text);
}

}  // namespace qwend
