// Small tokenizers made in the test, and the folders of real ones.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/tokenizer/tokenizer.h"
#include "nlohmann/json.hpp"

namespace qwend::testing {

inline std::filesystem::path SourceDir() { return QWEND_SOURCE_DIR; }
inline std::filesystem::path DemoDir() { return SourceDir() / "models/demo"; }
// The full Qwen3 tokenizer; not part of the project, present on some machines.
inline std::filesystem::path Qwen3Dir() { return SourceDir() / "../shared/tokenizers/qwen3"; }

inline nlohmann::json ReadJson(const std::filesystem::path& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in);
}

inline std::string ReadText(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The character that stands for `byte` in GPT-2's alphabet, built the way its encoder.py says.
inline std::string AlphabetCharacter(int byte) {
  const auto printable = [](int b) {
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
  };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += !printable(b);
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// A tokenizer.json whose vocabulary is the 256 bytes (id = byte) and the results of `merges` (ids
// from 256 on), given in the byte alphabet. Splits by GPT-2's regex, no normalizer.
inline nlohmann::json SmallTokenizer(
    const std::vector<std::pair<std::string, std::string>>& merges) {
  nlohmann::json vocab = nlohmann::json::object();
  for (int b = 0; b < 256; ++b) vocab[AlphabetCharacter(b)] = b;
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [left, right] : merges) {
    const auto id = static_cast<int>(vocab.size());
    if (!vocab.contains(left + right)) vocab[left + right] = id;
    list.push_back({left, right});
  }
  return {
      {"added_tokens", nlohmann::json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", list}}}};
}

inline nlohmann::json AddedTokenJson(int id, const std::string& content,
                                     const nlohmann::json& flags = nlohmann::json::object()) {
  nlohmann::json token = {{"id", id},           {"content", content}, {"special", false},
                          {"lstrip", false},    {"rstrip", false},    {"single_word", false},
                          {"normalized", false}};
  token.update(flags);
  return token;
}

}  // namespace qwend::testing
