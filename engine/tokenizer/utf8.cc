#include "engine/tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace qwend {
namespace {

enum class Form { kWhole, kBroken, kUnfinished };

struct Sequence {
  Form form;
  int length;  // bytes; of a broken one, its maximal part that could have begun a character
};

// The sequence at the front of `bytes`, which is not empty.
Sequence ScanSequence(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Form::kWhole, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Form::kBroken, 1};
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range keeps out overlong forms, surrogates and what is above U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == bytes.size()) return {Form::kUnfinished, i};
    if (byte(i) < low || byte(i) > high) return {Form::kBroken, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Form::kWhole, length};
}

// The length of the run of ASCII from `position` on, by whole words and then by bytes.
size_t AsciiEnd(std::string_view text, size_t position) {
  for (; position + 8 <= text.size(); position += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + position, 8);
    if (word & 0x8080808080808080u) break;
  }
  while (position < text.size() && static_cast<uint8_t>(text[position]) < 0x80) ++position;
  return position;
}

}  // namespace

size_t FindInvalidUtf8(std::string_view text) {
  size_t position = AsciiEnd(text, 0);
  while (position < text.size()) {
    const Sequence sequence = ScanSequence(text.substr(position, 4));
    if (sequence.form != Form::kWhole) return position;
    position += sequence.length;
    if (sequence.length == 1) position = AsciiEnd(text, position);
  }
  return std::string_view::npos;
}

size_t AppendUtf8Lossy(std::string_view bytes, bool at_end, std::string* out) {
  size_t position = 0;
  while (position < bytes.size()) {
    const size_t ascii_end = AsciiEnd(bytes, position);
    out->append(bytes.substr(position, ascii_end - position));
    position = ascii_end;
    if (position == bytes.size()) break;
    const Sequence sequence = ScanSequence(bytes.substr(position, 4));
    if (sequence.form == Form::kUnfinished && !at_end) break;
    if (sequence.form == Form::kWhole) {
      out->append(bytes.substr(position, sequence.length));
    } else {
      out->append("\xEF\xBF\xBD");
    }
    position += sequence.length;
  }
  return position;
}

void AppendCodePoint(char32_t c, std::string* out) {
  const auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

char32_t NextCodePoint(std::string_view text, size_t* position) {
  const auto lead = static_cast<uint8_t>(text[(*position)++]);
  if (lead < 0x80) return lead;
  const int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  char32_t c = lead & (0x3F >> more);
  for (int i = 0; i < more; ++i) c = c << 6 | (static_cast<uint8_t>(text[(*position)++]) & 0x3F);
  return c;
}

}  // namespace qwend
