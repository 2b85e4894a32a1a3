// What lies below the tokenizer: UTF-8, normal form C, and Oniguruma's regexes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <string>
#include <vector>

#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/regex.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kReplacement[] = "\uFFFD";

std::string Lossy(std::string_view bytes) {
  std::string out;
  EXPECT_EQ(AppendUtf8Lossy(bytes, /*at_end=*/true, &out), bytes.size());
  return out;
}

TEST(Utf8, EveryCodePointAndNoOther) {
  for (char32_t c = 0; c <= 0x110000; ++c) {
    std::string text;
    AppendCodePoint(c, &text);
    const bool valid = c < 0x110000 && (c < 0xD800 || c > 0xDFFF);
    ASSERT_EQ(IsValidUtf8(text), valid) << std::hex << static_cast<uint32_t>(c);
    if (!valid) continue;
    size_t position = 0;
    ASSERT_EQ(NextCodePoint(text, &position), c);
    ASSERT_EQ(position, text.size());
    for (size_t cut = 1; cut < text.size(); ++cut) {
      ASSERT_FALSE(IsValidUtf8(text.substr(0, cut)));
      std::string out;
      ASSERT_EQ(AppendUtf8Lossy(text.substr(0, cut), /*at_end=*/false, &out), 0u);
    }
  }
  EXPECT_EQ(FindInvalidUtf8("0123456789\xFF"), 10u);
  EXPECT_EQ(FindInvalidUtf8("\u00E9\u4F60\xE4\xBD"), 5u);
}

TEST(Utf8, BrokenCharactersAreReplacedByMaximalParts) {
  const std::string r = kReplacement;
  EXPECT_EQ(Lossy("a\x80\x62"), "a" + r + "b");
  EXPECT_EQ(Lossy("\xF0\x9F\x98"), r);  // one unfinished character
  EXPECT_EQ(Lossy("\xF0\x9F\x98X"), r + "X");
  EXPECT_EQ(Lossy("\xC0\xAF"), r + r);  // overlong
  EXPECT_EQ(Lossy("\xE0\x80\xAF"), r + r + r);
  EXPECT_EQ(Lossy("\xED\xA0\x80"), r + r + r);  // a surrogate
  EXPECT_EQ(Lossy("\xF4\x91\x92\x93\xFF"), r + r + r + r + r);
  // The Unicode standard's own example (table 3-11).
  EXPECT_EQ(Lossy("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
}

std::string Nfc(const std::string& text) {
  const auto result = NormalizeNfc(text);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : "";
}

TEST(Nfc, ComposesOrdersAndLeavesAlone) {
  EXPECT_EQ(Nfc("cafe\u0301 x"), "caf\u00E9 x");
  EXPECT_EQ(Nfc("\u212B\u2126"), "\u00C5\u03A9");
  EXPECT_EQ(Nfc("\u1112\u1161\u11AB"), "\uD55C");
  EXPECT_EQ(Nfc("q\u0307\u0323"), "q\u0323\u0307");  // ordered by class
  EXPECT_EQ(Nfc("a\u0323\u0307"), "\u1EA1\u0307");
  EXPECT_EQ(Nfc("\u0958"), "\u0915\u093C");  // excluded from composition
  EXPECT_EQ(Nfc("\u0301a"), "\u0301a");
  EXPECT_EQ(Nfc("\u00E9\u0327\u00E9"), "\u0229\u0301\u00E9");
  EXPECT_EQ(Nfc("\uFFFE\U0010FFFF"), "\uFFFE\U0010FFFF");  // noncharacters
  EXPECT_EQ(Nfc(std::string("e\0\u0301", 4)), std::string("e\0\u0301", 4));
  EXPECT_FALSE(MayNeedNfc("caf\u00E9 \u02FF"));
  EXPECT_TRUE(MayNeedNfc("\u0300"));
}

TEST(Nfc, ManyMarksAreNotQuadratic) {
  std::string text = "a";
  for (int i = 0; i < 100'000; ++i) text += "\u0301\u0323";
  const std::clock_t start = std::clock();
  const std::string composed = Nfc(text);
  EXPECT_EQ(composed.substr(0, 7), "\u1EA1\u0323\u0323");
  // Takes 0.02 s; sorting the marks by swaps takes a minute.
  EXPECT_LT(std::clock() - start, 5 * CLOCKS_PER_SEC);
}

std::vector<std::string> Pieces(const Regex& regex, const std::string& text) {
  std::vector<std::string> pieces;
  const absl::Status status = regex.Partition(text, [&](std::string_view piece) {
    pieces.emplace_back(piece);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return pieces;
}

std::vector<std::string> Pieces(const std::string& pattern, const std::string& text) {
  const auto regex = Regex::Compile(pattern);
  EXPECT_TRUE(regex.ok()) << regex.status();
  return regex.ok() ? Pieces(*regex, text) : std::vector<std::string>();
}

TEST(Regex, PartitionsTheText) {
  EXPECT_THAT(Pieces("b+", "abbcb"), ElementsAre("a", "bb", "c", "b"));
  EXPECT_THAT(Pieces("x", ""), ElementsAre());
  EXPECT_THAT(Pieces("x*", "axxb"), ElementsAre("a", "xx", "b"));
  EXPECT_THAT(Pieces("(?=\u4F60)", "a\u4F60\u4F60"), ElementsAre("a", "\u4F60", "\u4F60"));
  EXPECT_THAT(Pieces(*Regex::CompileLiteral("a.c"), "xa.cabc"), ElementsAre("x", "a.c", "abc"));
}

TEST(Regex, ReadsOnigurumaAsOnigurumaDoes) {
  EXPECT_THAT(Pieces("(?i:'s)", "'S'\u017F'\u00DF"), ElementsAre("'S", "'\u017F", "'\u00DF"));
  // U+180E is no white space, U+0085 is.
  EXPECT_THAT(Pieces("\\s+", "a\u180Eb\u0085\u3000c"),
              ElementsAre("a\u180Eb", "\u0085\u3000", "c"));
  EXPECT_THAT(Pieces("[^\\s\\p{L}]+", "a\u180E1 "), ElementsAre("a", "\u180E1", " "));
  EXPECT_THAT(Pieces("\\w+", "-e\u0301_\u203F\u0663-"),
              ElementsAre("-", "e\u0301_\u203F\u0663", "-"));
  EXPECT_THAT(Pieces("\\h", "g f"), ElementsAre("g ", "f"));
  EXPECT_THAT(Pieces("[\\s-]", "a-b c"), ElementsAre("a", "-", "b", " ", "c"));
  EXPECT_THAT(Pieces("\\p{Han}+", "a\u4F60\u3001"), ElementsAre("a", "\u4F60", "\u3001"));
  EXPECT_THAT(Pieces("\\p{N}{1,3}", "12345"), ElementsAre("123", "45"));
  EXPECT_THAT(Pieces("\\u4f60|\\x{597D}|\\x41", "\u4F60\u597DAB"),
              ElementsAre("\u4F60", "\u597D", "A", "B"));
  EXPECT_THAT(Pieces("a{b", "a{b"), ElementsAre("a{b"));
}

TEST(Regex, RefusesWhatItWouldReadDifferently) {
  for (const char* pattern :
       {"[a[b]]", "[a&&b]", "a{2}?", "a{1,2}+", "(?m:.)", "(?i)a", "(?<n>a)", "\\b", "\\R", "[\\S]",
        "\\xE9", "\\pL", "\\", "[a", "(*UCP)a", "\\p{Alpha}", "(a", "*"}) {
    const auto regex = Regex::Compile(pattern);
    EXPECT_EQ(regex.status().code(), absl::StatusCode::kInvalidArgument) << pattern;
    EXPECT_THAT(regex.status().message(), HasSubstr("at byte")) << pattern;
  }
}

TEST(Regex, LimitsAreAnErrorAndDepthIsNot) {
  const auto steep = Regex::Compile("(?:a+)+[bc]");
  ASSERT_TRUE(steep.ok()) << steep.status();
  const absl::Status status =
      steep->Partition(std::string(100, 'a'), [](std::string_view) { return absl::OkStatus(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  // Deeper than the JIT's stack, which the interpreter's heap takes over.
  const std::string deep(200'000, 'a');
  EXPECT_THAT(Pieces("(?:a|b)+c|a+", deep), ElementsAre(deep));
}

}  // namespace
}  // namespace qwend
