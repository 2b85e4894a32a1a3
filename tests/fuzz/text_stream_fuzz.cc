// Detokenizer against Decode, and StopMatcher against a search of the whole text.
//
// Input: the number of stop strings (mod 5), their lengths (mod 8), their bytes, then the ids or
// the text.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/tokenizer/text_stream.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/utf8.h"
#include "tests/fuzz/check.h"

namespace {

using qwend::fuzz::Check;

const qwend::Tokenizer& Demo() {
  static const auto tokenizer = qwend::Tokenizer::Load(QWEND_SOURCE_DIR "/models/demo");
  Check(tokenizer.ok(), "the demo tokenizer loads");
  return **tokenizer;
}

void CheckDetokenizer(const std::string& bytes, bool skip) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) {
    const int wide = static_cast<uint8_t>(bytes[i]) << 8 | static_cast<uint8_t>(bytes[i + 1]);
    ids.push_back(wide % (Demo().size() + 2) - 1);
  }
  qwend::Detokenizer detokenizer(Demo(), skip);
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = detokenizer.Append(id);
    Check(qwend::IsValidUtf8(piece), "a piece is whole characters");
    text += piece;
  }
  text += detokenizer.Flush();
  Check(text == Demo().Decode(ids, skip), "the pieces are the decoded text");
}

void CheckStopMatcher(const std::vector<std::string>& stops, const std::string& text, bool include,
                      size_t piece_size) {
  // The first end, and the earliest beginning for it.
  size_t stop_begin = std::string::npos, stop_end = std::string::npos;
  for (const std::string& stop : stops) {
    const size_t begin = stop.empty() ? std::string::npos : text.find(stop);
    if (begin == std::string::npos) continue;
    const size_t end = begin + stop.size();
    if (end < stop_end || (end == stop_end && begin < stop_begin)) {
      stop_begin = begin;
      stop_end = end;
    }
  }
  qwend::StopMatcher matcher(stops, include);
  std::string released;
  for (size_t at = 0; at < text.size(); at += piece_size) {
    const auto result = matcher.Append(std::string_view(text).substr(at, piece_size));
    released += result.text;
    if (!result.stop_string) continue;
    Check(stop_end != std::string::npos && at < stop_end, "a stop string is where one is");
    Check(*result.stop_string == text.substr(stop_begin, stop_end - stop_begin), "the right one");
    Check(released == text.substr(0, include ? stop_end : stop_begin), "the text up to it");
    return;
  }
  Check(stop_end == std::string::npos, "no stop string is missed");
  Check(released + matcher.Flush() == text, "nothing is lost");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string rest(reinterpret_cast<const char*>(data), size);
  const auto take = [&](size_t n) {
    const std::string head = rest.substr(0, n);
    rest.erase(0, n);
    return head;
  };
  const auto number = [&] {
    const std::string byte = take(1);
    return byte.empty() ? 0 : static_cast<uint8_t>(byte[0]);
  };
  std::vector<std::string> stops(number() % 5);
  for (std::string& stop : stops) stop = take(number() % 8);
  const int flags = number();
  CheckDetokenizer(rest, flags & 1);
  CheckStopMatcher(stops, rest, flags & 2, 1 + flags / 4 % 7);
  // Few letters make stop strings and their beginnings frequent.
  const auto narrow = [](std::string text) {
    for (char& c : text) c = static_cast<char>('a' + static_cast<uint8_t>(c) % 2);
    return text;
  };
  for (std::string& stop : stops) stop = narrow(stop);
  CheckStopMatcher(stops, narrow(rest), flags & 2, 1 + flags / 4 % 7);
  return 0;
}
