// What the tests of chat templates share.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "engine/tokenizer/chat_template.h"
#include "nlohmann/json.hpp"

namespace qwend {

inline std::string ReadTestFile(const std::filesystem::path& path) {
  std::ifstream file(std::filesystem::path(QWEND_SOURCE_DIR) / path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

inline nlohmann::ordered_json ReadTestJson(const std::filesystem::path& path) {
  return nlohmann::ordered_json::parse(ReadTestFile(path));
}

// A rendering, or "error: " and the message.
inline std::string RenderOrError(std::string_view source, const ChatInput& input) {
  const auto parsed = ChatTemplate::Parse(source);
  if (!parsed.ok()) return "error: " + std::string(parsed.status().message());
  const auto text = (*parsed)->Render(input);
  return text.ok() ? *text : "error: " + std::string(text.status().message());
}

inline std::string RenderMessages(std::string_view source, nlohmann::ordered_json messages = {}) {
  ChatInput input;
  input.messages = std::move(messages);
  return RenderOrError(source, input);
}

// The message without "chat template, line N: "; `line`, when given, becomes N, or 0 without one.
inline std::string WithoutLine(std::string_view message, int* line = nullptr) {
  constexpr std::string_view kPrefix = "chat template, line ";
  if (line != nullptr) *line = 0;
  if (!message.starts_with(kPrefix)) return std::string(message);
  const size_t colon = message.find(": ");
  if (line != nullptr) *line = std::stoi(std::string(message.substr(kPrefix.size())));
  return std::string(message.substr(colon + 2));
}

}  // namespace qwend
