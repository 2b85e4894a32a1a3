// Token ids and round trips as Hugging Face's tokenizers library gave them.
#include <gtest/gtest.h>

#include "tests/engine/tokenizer_fixture.h"

namespace qwend::testing {
namespace {

using nlohmann::json;

void ExpectReferences(const std::filesystem::path& dir, const std::filesystem::path& references) {
  const auto tokenizer = Tokenizer::Load(dir);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const json root = ReadJson(references);
  ASSERT_GT(root.at("encode").size(), 400u);
  for (const json& entry : root.at("encode")) {
    const auto text = entry.at("text").get<std::string>();
    const auto ids = entry.at("ids").get<std::vector<int32_t>>();
    const auto encoded = (*tokenizer)->Encode(text, /*parse_special=*/true);
    ASSERT_TRUE(encoded.ok()) << encoded.status() << " for " << entry.at("text");
    EXPECT_EQ(*encoded, ids) << entry.at("text");
    EXPECT_LE((*tokenizer)->LeastTokens(entry.at("text").get<std::string>()),
              static_cast<int64_t>(ids.size()))
        << entry.at("text");
    EXPECT_EQ((*tokenizer)->Decode(ids, /*skip_special_tokens=*/false), entry.at("decoded"))
        << entry.at("text");
  }
}

TEST(TokenizerGolden, Demo) {
  ExpectReferences(DemoDir(), SourceDir() / "tests/golden/text-demo.json");
}

TEST(TokenizerGolden, Qwen3) {
  if (!std::filesystem::exists(Qwen3Dir())) GTEST_SKIP() << "not present: " << Qwen3Dir();
  ExpectReferences(Qwen3Dir(), SourceDir() / "../shared/golden/text-qwen3.json");
}

TEST(TokenizerGolden, DemoFacts) {
  const auto tokenizer = Tokenizer::Load(DemoDir());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->size(), 3183);
  EXPECT_EQ((*tokenizer)->eos_token(), "<|im_end|>");
  EXPECT_EQ((*tokenizer)->eos_token_id(), 3178);
  EXPECT_EQ((*tokenizer)->bos_token(), "");
  EXPECT_EQ((*tokenizer)->TokenId("<think>"), 3179);
  EXPECT_EQ((*tokenizer)->TokenId("the"), std::nullopt);
  EXPECT_TRUE((*tokenizer)->IsSpecial(3176));
  EXPECT_FALSE((*tokenizer)->IsSpecial(0));
  EXPECT_FALSE((*tokenizer)->IsSpecial(-1));
  EXPECT_FALSE((*tokenizer)->IsSpecial(3183));
  EXPECT_EQ((*tokenizer)->TokenBytes(3177), "<|im_start|>");
  EXPECT_EQ((*tokenizer)->TokenBytes(220), " ");
  EXPECT_EQ((*tokenizer)->TokenBytes(-1), "");
  EXPECT_EQ((*tokenizer)->TokenBytes(3183), "");
}

}  // namespace
}  // namespace qwend::testing
