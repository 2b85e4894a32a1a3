// GPT-2's byte alphabet: one printable character for each of the 256 bytes, so that any bytes can
// stand in a vocabulary file. Printable Latin-1 stands for itself, the rest for U+0100 onwards.
// Source: openai/gpt-2, encoder.py (bytes_to_unicode).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/tokenizer/utf8.h"

namespace qwend::tokenizer_internal {

// The byte that each character below U+0144 stands for, or -1.
inline const std::array<int16_t, 0x144>& ByteOfCharacter() {
  static const std::array<int16_t, 0x144> table = [] {
    std::array<int16_t, 0x144> bytes;
    bytes.fill(-1);
    int next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
      bytes[printable ? b : next++] = static_cast<int16_t>(b);
    }
    return bytes;
  }();
  return table;
}

// The bytes that `token` spells; nothing when it has a character outside the alphabet.
inline std::optional<std::string> BytesOfToken(std::string_view token) {
  const auto& table = ByteOfCharacter();
  std::string bytes;
  bytes.reserve(token.size());
  for (size_t position = 0; position < token.size();) {
    const char32_t c = NextCodePoint(token, &position);
    if (c >= table.size() || table[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(table[c]));
  }
  return bytes;
}

}  // namespace qwend::tokenizer_internal
