// Chat templates: a small interpreter of the Jinja that published model folders use.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace qwend {

struct ChatInput {
  nlohmann::ordered_json messages =
      nlohmann::ordered_json::array();  // [{role, content, reasoning_content?, tool_calls?}]
  nlohmann::ordered_json tools;         // array of function definitions, or null
  bool add_generation_prompt = true;
  std::optional<bool> enable_thinking;  // unset: undefined in the template
  std::string bos_token;
  std::string eos_token;
};

// Immutable after Parse; Render may be called from any thread.
class ChatTemplate {
 public:
  // INVALID_ARGUMENT names the line and the construct that is not Jinja, or not covered.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source);
  // Looks for chat_template.jinja, then the chat_template key of tokenizer_config.json. NOT_FOUND
  // when there is neither.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::filesystem::path& dir);
  virtual ~ChatTemplate() = default;

  // INVALID_ARGUMENT carries the template's own raise_exception text, or what went wrong and the
  // line. Bounded in output size and steps, so that no template hangs a caller.
  virtual absl::StatusOr<std::string> Render(const ChatInput& input) const = 0;
};

}  // namespace qwend
