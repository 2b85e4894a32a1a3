// Streams against the whole text: whatever way it is cut, the same comes out.
#include "engine/tokenizer/text_stream.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/tokenizer/utf8.h"
#include "tests/engine/tokenizer_fixture.h"

namespace qwend::testing {
namespace {

const Tokenizer& Demo() {
  static const auto tokenizer = Tokenizer::Load(DemoDir());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return **tokenizer;
}

// True when more bytes could make a character of `bytes`.
bool CouldBecomeCharacter(const std::string& bytes) {
  std::string out;
  return !bytes.empty() && AppendUtf8Lossy(bytes, /*at_end=*/false, &out) == 0;
}

TEST(Detokenizer, EqualsDecodeForRandomIds) {
  const Tokenizer& tokenizer = Demo();
  // Tokens of a single byte meet often, so that characters are built up and broken off.
  std::vector<int32_t> single_bytes;
  for (int32_t id = 0; id < tokenizer.size(); ++id) {
    const std::string_view bytes = tokenizer.TokenBytes(id);
    if (bytes.size() == 1 && static_cast<uint8_t>(bytes[0]) >= 0x80) single_bytes.push_back(id);
  }
  ASSERT_EQ(single_bytes.size(), 128u);
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    const bool skip = random() % 2;
    Detokenizer detokenizer(tokenizer, skip);
    std::vector<int32_t> ids;
    std::string text, bytes;
    for (int n = random() % 30; n > 0; --n) {
      const int32_t id = random() % 4 == 0
                             ? static_cast<int32_t>(random() % (tokenizer.size() + 2)) - 1
                             : single_bytes[random() % single_bytes.size()];
      ids.push_back(id);
      const std::string piece = detokenizer.Append(id);
      ASSERT_TRUE(IsValidUtf8(piece));
      text += piece;
      // Nothing is held back that is already certain: what is missing is an unfinished character.
      if (!skip || !tokenizer.IsSpecial(id)) bytes += tokenizer.TokenBytes(id);
      std::string certain;
      const size_t taken = AppendUtf8Lossy(bytes, /*at_end=*/false, &certain);
      ASSERT_EQ(text, certain);
      ASSERT_TRUE(taken == bytes.size() || CouldBecomeCharacter(bytes.substr(taken)));
    }
    text += detokenizer.Flush();
    ASSERT_EQ(text, tokenizer.Decode(ids, skip));
    ASSERT_EQ(detokenizer.Flush(), "");
  }
}

TEST(Detokenizer, HoldsBackHalfACharacter) {
  const Tokenizer& tokenizer = Demo();
  std::vector<int32_t> ids;  // of the four bytes of U+1F600
  for (const char c : std::string("\U0001F600")) {
    for (int32_t id = 0; id < tokenizer.size(); ++id) {
      if (tokenizer.TokenBytes(id) == std::string_view(&c, 1)) ids.push_back(id);
    }
  }
  ASSERT_EQ(ids.size(), 4u);
  Detokenizer detokenizer(tokenizer, true);
  EXPECT_EQ(detokenizer.Append(ids[0]), "");
  EXPECT_EQ(detokenizer.Append(ids[1]), "");
  EXPECT_EQ(detokenizer.Append(ids[2]), "");
  EXPECT_EQ(detokenizer.Append(ids[3]), "\U0001F600");
  EXPECT_EQ(detokenizer.Append(ids[0]), "");
  EXPECT_EQ(detokenizer.Append(ids[0]), "\uFFFD");  // the first one can never become a character
  EXPECT_EQ(detokenizer.Append(*tokenizer.TokenId("<|im_end|>")), "");  // skipped
  EXPECT_EQ(detokenizer.Append(ids[1]), "");
  EXPECT_EQ(detokenizer.Flush(), "\uFFFD");
  EXPECT_EQ(detokenizer.Append(64), std::string(tokenizer.TokenBytes(64)));
}

struct Found {
  size_t begin = std::string::npos;
  std::string stop;
};

// The first end of any stop string, and the longest of those that end there.
Found NaiveSearch(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    Found found;
    for (const std::string& stop : stops) {
      if (stop.empty() || stop.size() > end || stop.size() <= found.stop.size()) continue;
      if (text.compare(end - stop.size(), stop.size(), stop) != 0) continue;
      found = {end - stop.size(), stop};
    }
    if (found.begin != std::string::npos) return found;
  }
  return {};
}

// The longest end of `text` that is a beginning of a stop string, but not all of it.
size_t NaiveHeld(const std::string& text, const std::vector<std::string>& stops) {
  size_t held = 0;
  for (const std::string& stop : stops) {
    for (size_t n = held + 1; n < stop.size() && n <= text.size(); ++n) {
      if (text.compare(text.size() - n, n, stop, 0, n) == 0) held = n;
    }
  }
  return held;
}

void ExpectLikeNaive(const std::vector<std::string>& pieces, const std::vector<std::string>& stops,
                     bool include) {
  StopMatcher matcher(stops, include);
  std::string seen, released;
  for (const std::string& piece : pieces) {
    seen += piece;
    const StopMatcher::Result result = matcher.Append(piece);
    released += result.text;
    ASSERT_TRUE(IsValidUtf8(result.text));
    const Found found = NaiveSearch(seen, stops);
    if (found.begin == std::string::npos) {
      ASSERT_FALSE(result.stop_string.has_value()) << seen;
      ASSERT_EQ(released, seen.substr(0, seen.size() - NaiveHeld(seen, stops)));
      continue;
    }
    ASSERT_EQ(result.stop_string, found.stop) << seen;
    ASSERT_EQ(released, seen.substr(0, found.begin) + (include ? found.stop : ""));
    ASSERT_EQ(matcher.Append("more").text, "");
    ASSERT_EQ(matcher.Flush(), "");
    return;
  }
  ASSERT_EQ(released + matcher.Flush(), seen);
}

TEST(StopMatcher, EqualsTheNaiveSearchForEveryWayToCut) {
  std::mt19937 random(5);
  const std::vector<std::string> letters = {"a", "b", "\u00E9", "\u4F60"};
  const auto word = [&](int most) {
    std::string text;
    for (int n = random() % most + 1; n > 0; --n) text += letters[random() % letters.size()];
    return text;
  };
  for (int round = 0; round < 150; ++round) {
    std::vector<std::string> stops;
    for (int n = random() % 4; n >= 0; --n) stops.push_back(word(4));
    std::vector<std::string> text;  // characters
    for (int n = random() % 9 + 1; n > 0; --n) text.push_back(letters[random() % letters.size()]);
    for (unsigned cuts = 0; cuts < 1u << (text.size() - 1); ++cuts) {
      std::vector<std::string> pieces = {text[0]};
      for (size_t i = 1; i < text.size(); ++i) {
        if (cuts >> (i - 1) & 1) pieces.emplace_back();
        pieces.back() += text[i];
      }
      ExpectLikeNaive(pieces, stops, round % 2 == 0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(StopMatcher, ManyLongStopStrings) {
  std::mt19937 random(6);
  std::vector<std::string> stops;
  for (int i = 0; i < 16; ++i) {
    std::string stop;
    for (int n = 100 + random() % 200; n > 0; --n) stop += "ab"[random() % 8 == 0];
    stops.push_back(stop);
  }
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string> pieces;
    for (int n = 0; n < 60; ++n) {
      const std::string& stop = stops[random() % stops.size()];
      const size_t begin = random() % 40;
      pieces.push_back(stop.substr(begin == 39 ? 0 : begin, random() % 20));
    }
    const std::string& last = stops[random() % stops.size()];
    pieces.push_back(last.substr(0, 50));
    pieces.push_back(last.substr(50) + "tail");
    ExpectLikeNaive(pieces, stops, round % 2 == 0);
    if (HasFatalFailure()) return;
  }
}

TEST(StopMatcher, ReleasesWhatCannotBecomeAStopString) {
  StopMatcher matcher({"</s>", "", "User:"}, /*include_stop_string=*/false);
  EXPECT_EQ(matcher.Append("a <").text, "a ");
  EXPECT_EQ(matcher.Append("/").text, "");
  EXPECT_EQ(matcher.Append("x Us").text, "</x ");
  EXPECT_EQ(matcher.Flush(), "Us");
  EXPECT_EQ(matcher.Append("er: ").text, "er: ");  // a new stream
  const StopMatcher::Result result = matcher.Append("bye </s> and more");
  EXPECT_EQ(result.text, "bye ");
  EXPECT_EQ(result.stop_string, "</s>");
}

TEST(StopMatcher, WithoutStopStringsEverythingPasses) {
  StopMatcher matcher({}, true);
  EXPECT_EQ(matcher.Append("text").text, "text");
  EXPECT_EQ(matcher.Flush(), "");
}

}  // namespace
}  // namespace qwend::testing
