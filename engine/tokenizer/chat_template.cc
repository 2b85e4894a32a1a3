#include "engine/tokenizer/chat_template.h"

#include <fstream>
#include <iterator>
#include <utility>

#include "absl/time/clock.h"
#include "engine/tokenizer/jinja/cat.h"
#include "engine/tokenizer/jinja/evaluator.h"
#include "engine/tokenizer/jinja/from_json.h"
#include "engine/tokenizer/jinja/parser.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend {
namespace {

using Variables = absl::flat_hash_map<std::string_view, jinja::Value>;

class JinjaTemplate : public ChatTemplate {
 public:
  explicit JinjaTemplate(jinja::Body body) : body_(std::move(body)) {}
  absl::StatusOr<std::string> Render(const ChatInput& input) const override;

 private:
  jinja::Body body_;
};

// What Hugging Face's apply_chat_template defines: tools and documents are none when not given, a
// special token that the model has not is undefined.
absl::StatusOr<Variables> ToVariables(jinja::Context& context, const ChatInput& input) {
  Variables variables;
  JINJA_ASSIGN(variables["messages"], jinja::FromJson(context, input.messages));
  JINJA_ASSIGN(variables["tools"], jinja::FromJson(context, input.tools));
  variables["documents"] = jinja::Value();
  variables["add_generation_prompt"] = jinja::Value(input.add_generation_prompt);
  if (input.enable_thinking.has_value()) {
    variables["enable_thinking"] = jinja::Value(*input.enable_thinking);
  }
  if (!input.bos_token.empty()) variables["bos_token"] = jinja::Value(input.bos_token);
  if (!input.eos_token.empty()) variables["eos_token"] = jinja::Value(input.eos_token);
  return variables;
}

absl::StatusOr<std::string> JinjaTemplate::Render(const ChatInput& input) const {
  jinja::Context context(absl::Now());
  JINJA_ASSIGN(Variables variables, ToVariables(context, input));
  jinja::Evaluator evaluator(context, std::move(variables));
  absl::StatusOr<std::string> text = evaluator.Run(body_);
  if (!text.ok()) return context.Located(text.status());
  return text;
}

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError(jinja::Cat(path.string(), ": cannot be read"));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return absl::InvalidArgumentError(jinja::Cat(path.string(), ": cannot be read"));
  return text;
}

// The source under tokenizer_config.json's chat_template: a string, or a list of named ones of
// which "default" is taken. Empty when there is none.
absl::StatusOr<std::string> FromTokenizerConfig(const std::filesystem::path& path) {
  JINJA_ASSIGN(const std::string text, ReadFile(path));
  const nlohmann::json config = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return absl::InvalidArgumentError(jinja::Cat(path.string(), ": is not a JSON object"));
  }
  const auto entry = config.find("chat_template");
  if (entry == config.end() || entry->is_null()) return std::string();
  if (entry->is_string()) return entry->get<std::string>();
  if (entry->is_array()) {
    for (const nlohmann::json& named : *entry) {
      if (!named.is_object() || !named.contains("name") || !named.contains("template")) continue;
      if (named["name"] == "default" && named["template"].is_string()) {
        return named["template"].get<std::string>();
      }
    }
  }
  return absl::InvalidArgumentError(jinja::Cat(
      path.string(), ": chat_template is neither a string nor a list with a template \"default\""));
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ParseFrom(const std::filesystem::path& path,
                                                        std::string_view source) {
  auto parsed = ChatTemplate::Parse(source);
  if (parsed.ok()) return parsed;
  return absl::Status(parsed.status().code(),
                      jinja::Cat(path.string(), ": ", parsed.status().message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(std::string_view source) {
  JINJA_ASSIGN(jinja::Body body, jinja::Parse(source));
  return std::make_unique<JinjaTemplate>(std::move(body));
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(const std::filesystem::path& dir) {
  std::error_code ignored;
  const std::filesystem::path file = dir / "chat_template.jinja";
  if (std::filesystem::exists(file, ignored)) {
    JINJA_ASSIGN(const std::string source, ReadFile(file));
    return ParseFrom(file, source);
  }
  const std::filesystem::path config = dir / "tokenizer_config.json";
  if (std::filesystem::exists(config, ignored)) {
    JINJA_ASSIGN(const std::string source, FromTokenizerConfig(config));
    if (!source.empty()) return ParseFrom(config, source);
  }
  return absl::NotFoundError(jinja::Cat(
      dir.string(), ": no chat_template.jinja, and no chat_template in tokenizer_config.json"));
}

}  // namespace qwend
