// Byte-pair merges, added tokens and pre-tokenizers, on tokenizers made for the purpose.
#include "engine/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <map>
#include <random>
#include <thread>

#include "engine/tokenizer/tokenizer_json.h"
#include "tests/engine/tokenizer_fixture.h"

namespace qwend::testing {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

std::unique_ptr<Tokenizer> Make(const json& tokenizer, const std::string& config = "") {
  auto result = TokenizerFromJson(tokenizer.dump(), config);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *std::move(result) : nullptr;
}

Ids Encoded(const Tokenizer& tokenizer, const std::string& text, bool parse_special = true) {
  const auto ids = tokenizer.Encode(text, parse_special);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : Ids();
}

Ids Bytes(std::string_view text) {
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}

// One merge at a time over the whole piece: the lowest rank, the leftmost among equals.
Ids NaiveMerge(Ids ids, const std::map<std::pair<int, int>, std::pair<int, int>>& merges) {
  while (true) {
    size_t best = 0;
    int best_rank = -1;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto it = merges.find({ids[i], ids[i + 1]});
      if (it == merges.end()) continue;
      if (best_rank >= 0 && it->second.first >= best_rank) continue;
      best = i;
      best_rank = it->second.first;
    }
    if (best_rank < 0) return ids;
    ids[best] = merges.at({ids[best], ids[best + 1]}).second;
    ids.erase(ids.begin() + best + 1);
  }
}

TEST(Bpe, EqualsTheNaiveMergeOnShortAndLongPieces) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    // Random merges over three letters, some of them reaching the same token in two ways.
    std::vector<std::string> tokens = {"a", "b", "c"};
    std::vector<std::pair<std::string, std::string>> pairs;
    for (int i = 0; i < 25; ++i) {
      const std::string left = tokens[random() % tokens.size()];
      const std::string right = tokens[random() % tokens.size()];
      if (left.size() + right.size() > 9) continue;
      if (std::find(pairs.begin(), pairs.end(), std::pair(left, right)) != pairs.end()) continue;
      pairs.emplace_back(left, right);
      tokens.push_back(left + right);
    }
    const json file = SmallTokenizer(pairs);
    const auto tokenizer = Make(file);
    const auto& vocab = file["model"]["vocab"];
    std::map<std::pair<int, int>, std::pair<int, int>> merges;
    for (size_t rank = 0; rank < pairs.size(); ++rank) {
      const auto& [left, right] = pairs[rank];
      merges[{vocab[left], vocab[right]}] = {static_cast<int>(rank), vocab[left + right]};
    }
    for (const int length : {1, 2, 3, 7, 20, 47, 48, 49, 50, 150, 400}) {
      for (int i = 0; i < 10; ++i) {
        std::string word;
        for (int n = 0; n < length; ++n) word += "abc"[random() % 3];
        ASSERT_EQ(Encoded(*tokenizer, word), NaiveMerge(Bytes(word), merges)) << word;
      }
    }
  }
}

TEST(Bpe, TakesMergesAsStringsAndWholeWordsWithIgnoreMerges) {
  json file = SmallTokenizer({{"a", "b"}, {"b", "c"}, {"ab", "c"}});
  const int abc = file["model"]["vocab"]["abc"];
  file["model"]["vocab"]["cab"] = 300;  // a token that no merge makes
  EXPECT_THAT(Encoded(*Make(file), "cab"), ElementsAre('c', 256));
  file["model"]["merges"] = {"#version: 0.2", "a b", "b c", "ab c"};
  const auto strings = Make(file);
  EXPECT_THAT(Encoded(*strings, "abc"), ElementsAre(abc));
  EXPECT_THAT(Encoded(*strings, "cab"), ElementsAre('c', 256));
  EXPECT_EQ(strings->size(), 301);
  EXPECT_EQ(strings->TokenBytes(299), "");
  EXPECT_EQ(strings->Decode(Ids{299, 'x', 5000, -3}, false), "x");
  file["model"]["ignore_merges"] = true;
  EXPECT_THAT(Encoded(*Make(file), "cab"), ElementsAre(300));
}

TEST(Bpe, ALongWordIsNotQuadratic) {
  std::vector<std::pair<std::string, std::string>> merges;
  for (std::string run = "a"; run.size() < 64; run += run) merges.emplace_back(run, run);
  const auto tokenizer = Make(SmallTokenizer(merges));
  const std::clock_t start = std::clock();
  EXPECT_EQ(Encoded(*tokenizer, std::string(300'000, 'a')).size(), 300'000u / 64 + 1);
  // Takes 0.05 s; a quadratic merge takes a minute. The bound leaves room for sanitizers.
  EXPECT_LT(std::clock() - start, 5 * CLOCKS_PER_SEC);
}

TEST(Tokenizer, RefusesTextThatIsNotUtf8AndTakesZeroBytes) {
  const auto tokenizer = Make(SmallTokenizer({}));
  for (const char* bad : {"\x80", "a\xC3", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"}) {
    const auto ids = tokenizer->Encode(bad, true);
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(Encoded(*tokenizer, std::string("x\0y", 3)), Bytes(std::string_view("x\0y", 3)));
  EXPECT_EQ(tokenizer->Decode(Ids{'x', 0, 'y'}, false), std::string("x\0y", 3));
  EXPECT_THAT(Encoded(*tokenizer, ""), ElementsAre());
}

TEST(AddedTokens, AreOrdinaryCharactersUnlessParsed) {
  json file = SmallTokenizer({});
  file["added_tokens"] = {AddedTokenJson(256, "<s>", {{"special", true}}),
                          AddedTokenJson(257, "<s>!"), AddedTokenJson(258, "<t>")};
  const auto tokenizer = Make(file);
  EXPECT_THAT(Encoded(*tokenizer, "a<s>b<t>"), ElementsAre('a', 256, 'b', 258));
  EXPECT_THAT(Encoded(*tokenizer, "<s><s>!<s"), ElementsAre(256, 257, '<', 's'));
  EXPECT_EQ(Encoded(*tokenizer, "a<s>b", false), Bytes("a<s>b"));
  EXPECT_EQ(tokenizer->Decode(Ids{'a', 256, 258}, false), "a<s><t>");
  EXPECT_EQ(tokenizer->Decode(Ids{'a', 256, 258}, true), "a<t>");
}

TEST(AddedTokens, StripWhiteSpaceAndWantWholeWords) {
  json file = SmallTokenizer({});
  file["added_tokens"] = {AddedTokenJson(256, "<l>", {{"lstrip", true}}),
                          AddedTokenJson(257, "<r>", {{"rstrip", true}}),
                          AddedTokenJson(258, "word", {{"single_word", true}})};
  const auto tokenizer = Make(file);
  EXPECT_THAT(Encoded(*tokenizer, "a \t\u3000<l> b"), ElementsAre('a', 256, ' ', 'b'));
  EXPECT_THAT(Encoded(*tokenizer, "a <r> \n b"), ElementsAre('a', ' ', 257, 'b'));
  EXPECT_THAT(Encoded(*tokenizer, "<r>  <l>"), ElementsAre(257, 256));
  EXPECT_THAT(Encoded(*tokenizer, "word (word)"), ElementsAre(258, ' ', '(', 258, ')'));
  EXPECT_EQ(Encoded(*tokenizer, "words"), Bytes("words"));
  EXPECT_EQ(Encoded(*tokenizer, "\u00E9word"), Bytes("\u00E9word"));
  EXPECT_EQ(Encoded(*tokenizer, "_word"), Bytes("_word"));
}

TEST(AddedTokens, NormalizedOnesAreFoundInNormalizedText) {
  json file = SmallTokenizer({});
  file["normalizer"] = {{"type", "NFC"}};
  file["added_tokens"] = {AddedTokenJson(256, "caf\u00E9", {{"normalized", true}}),
                          AddedTokenJson(257, "th\u00E9")};
  const auto tokenizer = Make(file);
  EXPECT_THAT(Encoded(*tokenizer, "cafe\u0301"), ElementsAre(256));
  EXPECT_THAT(Encoded(*tokenizer, "th\u00E9"), ElementsAre(257));
  EXPECT_EQ(Encoded(*tokenizer, "the\u0301"), Bytes("th\u00E9"));  // normalized too late
}

TEST(AddedTokens, ComeFromBothFiles) {
  json file = SmallTokenizer({});
  file["added_tokens"] = {AddedTokenJson(256, "<a>", {{"special", true}})};
  const std::string config = R"({"added_tokens_decoder": {
      "256": {"content": "<a>", "special": true}, "260": {"content": "<b>", "special": true}},
      "eos_token": {"content": "<b>"}, "bos_token": "<a>"})";
  const auto tokenizer = Make(file, config);
  EXPECT_EQ(tokenizer->size(), 261);
  EXPECT_THAT(Encoded(*tokenizer, "<a><b>"), ElementsAre(256, 260));
  EXPECT_EQ(tokenizer->TokenId("<b>"), 260);
  EXPECT_TRUE(tokenizer->IsSpecial(260));
  EXPECT_EQ(tokenizer->eos_token_id(), 260);
  EXPECT_EQ(tokenizer->bos_token(), "<a>");
}

TEST(PreTokenizer, Gpt2RegexAndPrefixSpace) {
  // With "bc" merged, a cut between b and c shows.
  json file = SmallTokenizer({{"1", "2"}, {"\u0120", "a"}, {"a", "1"}, {"\u0120", "\u0120"}});
  EXPECT_THAT(Encoded(*Make(file), "a12 a"), ElementsAre('a', 256, 257));
  EXPECT_THAT(Encoded(*Make(file), "   a"), ElementsAre(259, 257));
  file["pre_tokenizer"]["use_regex"] = false;
  EXPECT_THAT(Encoded(*Make(file), "a12"), ElementsAre('a', 256));
  EXPECT_THAT(Encoded(*Make(file), "a1a"), ElementsAre(258, 'a'));
  file["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_THAT(Encoded(*Make(file), "a"), ElementsAre(257));
  EXPECT_THAT(Encoded(*Make(file), "\na"), ElementsAre('\n', 'a'));
}

TEST(PreTokenizer, SequencesOfSplitsAndDigits) {
  json file = SmallTokenizer({{"1", "2"}, {"a", "-"}, {"-", "b"}});
  const json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const auto split = [](const json& pattern) -> json {
    return {{"type", "Split"}, {"pattern", pattern}, {"behavior", "Isolated"}, {"invert", false}};
  };
  const auto sequence = [&](const json& first) {
    file["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {first, byte_level}}};
    return Make(file);
  };
  EXPECT_THAT(Encoded(*sequence(split({{"String", "-"}})), "a-b12"),
              ElementsAre('a', '-', 'b', 256));
  EXPECT_THAT(Encoded(*sequence(split({{"Regex", "\\w-|\\d"}})), "a-b12"),
              ElementsAre(257, 'b', '1', '2'));
  const json digits = {{"type", "Digits"}, {"individual_digits", true}};
  EXPECT_THAT(Encoded(*sequence(digits), "a-b12"), ElementsAre(257, 'b', '1', '2'));
}

TEST(TokenizerLoad, ErrorsNameFileAndKey) {
  const json good = SmallTokenizer({{"a", "b"}});
  const auto error = [&](const char* pointer, const json& value, const std::string& config = "") {
    json file = good;
    file[json::json_pointer(pointer)] = value;
    const auto result = TokenizerFromJson(file.dump(), config);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << pointer;
    return std::string(result.status().message());
  };
  EXPECT_THAT(error("/model/type", "Unigram"), HasSubstr("tokenizer.json: model.type: 'Unigram'"));
  EXPECT_THAT(error("/model/byte_fallback", true), HasSubstr("model.byte_fallback"));
  EXPECT_THAT(error("/model/dropout", 0.1), HasSubstr("model.dropout"));
  EXPECT_THAT(error("/model/end_of_word_suffix", "</w>"), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(error("/model/vocab", 3), HasSubstr("model.vocab: must be an object"));
  EXPECT_THAT(error("/model/vocab/a", -1), HasSubstr("the id of 'a'"));
  EXPECT_THAT(error("/model/vocab/a", 1 << 30), HasSubstr("the id of 'a'"));
  EXPECT_THAT(error("/model/vocab/a", 98), HasSubstr("id 98 is given to"));
  EXPECT_THAT(error("/model/merges", json::array({"a b c"})), HasSubstr("model.merges[0]"));
  EXPECT_THAT(error("/model/merges", json::array({"a c"})),
              HasSubstr("'ac' is not in model.vocab"));
  EXPECT_THAT(error("/model/merges", nullptr), HasSubstr("model.merges"));
  EXPECT_THAT(error("/normalizer", {{"type", "NFKC"}}), HasSubstr("normalizer.type: 'NFKC'"));
  EXPECT_THAT(error("/decoder", nullptr), HasSubstr("decoder.type"));
  EXPECT_THAT(error("/pre_tokenizer", nullptr), HasSubstr("pre_tokenizer"));
  EXPECT_THAT(error("/pre_tokenizer", {{"type", "Metaspace"}}), HasSubstr("'Metaspace'"));
  EXPECT_THAT(
      error("/pre_tokenizer",
            {{"type", "Sequence"},
             {"pretokenizers",
              {{{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "("}}}}}}}),
      HasSubstr("pre_tokenizer.pretokenizers[0]: regex '('"));
  EXPECT_THAT(error("/added_tokens", json::array({AddedTokenJson(300, "")})),
              HasSubstr("added_tokens[0]"));
  EXPECT_THAT(error("/added_tokens", {AddedTokenJson(300, "<x>"), AddedTokenJson(300, "<y>")}),
              HasSubstr("added_tokens[1]: added token id 300 is given to '<x>' and to '<y>'"));
  EXPECT_THAT(error("/added_tokens", json::array({AddedTokenJson(5, "<x>")})),
              HasSubstr("another token"));
  EXPECT_THAT(error("/version", 1, "{"), HasSubstr("tokenizer_config.json: "));
  EXPECT_THAT(error("/version", 1, R"({"added_tokens_decoder": {"x": {"content": "<y>"}}})"),
              HasSubstr("tokenizer_config.json: added_tokens_decoder.x"));
  json lacking = good;
  lacking["model"]["vocab"].erase("z");
  lacking["model"]["unk_token"] = "a";
  EXPECT_THAT(TokenizerFromJson(lacking.dump(), "").status().message(), HasSubstr("unk_token"));
  EXPECT_THAT(TokenizerFromJson("{\"a\":", "").status().message(), HasSubstr("tokenizer.json: "));
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "a_folder";
  std::filesystem::create_directories(folder / "tokenizer.json");  // not a file
  const auto unreadable = Tokenizer::Load(folder);
  EXPECT_THAT(unreadable.status().message(), HasSubstr("a_folder/tokenizer.json: cannot be read"));
  EXPECT_EQ(Tokenizer::Load("/nonexistent").status().code(), absl::StatusCode::kNotFound);
}

TEST(TokenizerLoad, AByteThatTheVocabularyLacksIsLeftOut) {
  json file = SmallTokenizer({{"a", "b"}});
  file["model"]["vocab"].erase("-");
  EXPECT_THAT(Encoded(*Make(file), "-a"), ElementsAre('a'));
  file["pre_tokenizer"]["use_regex"] = false;
  EXPECT_THAT(Encoded(*Make(file), "a-b"), ElementsAre(256));
}

TEST(Tokenizer, ServesThreadsAtOnce) {
  const auto tokenizer = Tokenizer::Load(DemoDir());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text =
      "<|im_start|>user\nCafe\u0301 no. 12?<|im_end|>\n" + std::string(200, 'x');
  const Ids expected = Encoded(**tokenizer, text);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) EXPECT_EQ(Encoded(**tokenizer, text), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace qwend::testing
