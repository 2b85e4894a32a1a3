// A tokenizer and a chat template that tests can predict.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

namespace qwend::testing {

constexpr int32_t kEos = 256;      // "<eos>", special
constexpr int32_t kSpecial = 257;  // "<tag>", special
constexpr int32_t kLong = 258;     // a thousand letters
constexpr int kFakeVocab = 300;    // ids from 259 have no token

// Ids below 256 are bytes.
class FakeTokenizer : public Tokenizer {
 public:
  FakeTokenizer() {
    for (int i = 0; i < 256; ++i) bytes_[i] = std::string(1, static_cast<char>(i));
    bytes_[kEos] = "<eos>";
    bytes_[kSpecial] = "<tag>";
    bytes_[kLong] = std::string(1000, 'x');
  }
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              bool parse_special) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      const int32_t special = text.substr(0, 5) == bytes_[kEos]       ? kEos
                              : text.substr(0, 5) == bytes_[kSpecial] ? kSpecial
                                                                      : -1;
      if (parse_special && special >= 0) {
        ids.push_back(special);
        text.remove_prefix(5);
      } else {
        ids.push_back(static_cast<uint8_t>(text[0]));
        text.remove_prefix(1);
      }
    }
    return ids;
  }
  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (!skip_special_tokens || !IsSpecial(id)) text += TokenBytes(id);
    }
    return text;
  }
  int64_t LeastTokens(std::string_view text) const override {
    return static_cast<int64_t>(text.size()) / 5;
  }
  std::string_view TokenBytes(int32_t id) const override {
    return id >= 0 && id < size() ? std::string_view(bytes_[id]) : std::string_view();
  }
  bool IsSpecial(int32_t id) const override { return id == kEos || id == kSpecial; }
  std::optional<int32_t> TokenId(std::string_view content) const override {
    for (const int32_t id : {kEos, kSpecial}) {
      if (content == bytes_[id]) return id;
    }
    return std::nullopt;
  }
  std::optional<int32_t> eos_token_id() const override { return kEos; }
  std::string bos_token() const override { return ""; }
  std::string eos_token() const override { return "<eos>"; }
  int size() const override { return static_cast<int>(bytes_.size()); }

 private:
  std::array<std::string, 259> bytes_;
};

// "role:content|" per message, then "assistant:". A content of "raise" is the template's own error.
class FakeTemplate : public ChatTemplate {
 public:
  absl::StatusOr<std::string> Render(const ChatInput& input) const override {
    std::string text;
    for (const auto& m : input.messages) {
      const std::string content = m.at("content").get<std::string>();
      if (content == "raise") return absl::InvalidArgumentError("the template does not like this");
      absl::StrAppend(&text, m.at("role").get<std::string>(), ":", content);
      if (m.contains("tool_calls")) absl::StrAppend(&text, m.at("tool_calls").dump());
      absl::StrAppend(&text, "|");
    }
    if (!input.tools.is_null()) absl::StrAppend(&text, "tools", input.tools.dump(), "|");
    if (input.enable_thinking.value_or(false)) absl::StrAppend(&text, "think|");
    if (input.add_generation_prompt) absl::StrAppend(&text, "assistant:");
    return text;
  }
};

}  // namespace qwend::testing
