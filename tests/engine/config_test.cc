// config.json and generation_config.json: what is read, and how each thing that can be wrong is
// named.
#include "engine/loader/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "tests/engine/small_configs.h"

namespace qwend {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

absl::StatusOr<ModelSpec> Parse(const json& config, std::vector<std::string>* warnings = nullptr) {
  std::vector<std::string> own;
  return ParseModelConfig(config.dump(), "config.json", warnings == nullptr ? own : *warnings);
}

// The config with one key set; a null value removes it.
json With(const char* base, const std::string& pointer, const json& value) {
  json config = json::parse(base);
  if (value.is_discarded()) {
    config = config.patch(json::array({{{"op", "remove"}, {"path", pointer}}}));
  } else {
    config[json::json_pointer(pointer)] = value;
  }
  return config;
}
const json kRemoved = json(json::value_t::discarded);

TEST(Config, FlatDenseModelsAreRead) {
  absl::StatusOr<ModelSpec> spec = Parse(json::parse(kLlama));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->family, "llama");
  EXPECT_EQ(spec->hidden, 8);
  EXPECT_EQ(spec->intermediate, 12);
  EXPECT_EQ(spec->num_layers(), 2);
  EXPECT_EQ(spec->num_full_attention_layers(), 2);
  EXPECT_EQ(spec->num_heads, 2);
  EXPECT_EQ(spec->num_kv_heads, 1);
  EXPECT_EQ(spec->head_dim, 4);
  EXPECT_EQ(spec->rotary_dim, 4);
  EXPECT_FLOAT_EQ(spec->rms_eps, 1e-5f);
  EXPECT_EQ(spec->rope_theta, 500000.0);
  EXPECT_TRUE(spec->tied_embeddings);
  EXPECT_EQ(spec->norm_weight_offset, 0.0f);
  EXPECT_FALSE(spec->qkv_bias || spec->output_bias || spec->qk_norm || spec->output_gate);
  EXPECT_EQ(spec->weight_type, DType::kBF16);
  EXPECT_THAT(spec->eos_token_ids, ElementsAre(2, 3));
}

TEST(Config, NestedHybridModelsAreRead) {
  absl::StatusOr<ModelSpec> spec = Parse(json::parse(kHybrid));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->family, "qwen3_5");
  EXPECT_EQ(spec->norm_weight_offset, 1.0f);
  EXPECT_TRUE(spec->qk_norm && spec->output_gate && spec->tied_embeddings);
  EXPECT_EQ(spec->rotary_dim, 4);  // a quarter of 16, though the key is absent
  EXPECT_EQ(spec->rope_theta, 1e7);
  EXPECT_THAT(spec->layers, ElementsAre(LayerKind::kLinearAttention, LayerKind::kLinearAttention,
                                        LayerKind::kLinearAttention, LayerKind::kFullAttention));
  EXPECT_EQ(spec->conv_channels(), 2 * 4 + 2 * 6);
  EXPECT_EQ(spec->conv_width, 4);
  EXPECT_THAT(spec->eos_token_ids, ElementsAre(5));

  json flat = json::parse(kHybrid)["text_config"];  // as a text-only export has it
  flat["architectures"] = {"Qwen3_5ForCausalLM"};
  flat["tie_word_embeddings"] = false;
  flat["layer_types"] = {"full_attention", "linear_attention", "full_attention",
                         "linear_attention"};
  spec = Parse(flat);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->tied_embeddings);
  EXPECT_EQ(spec->layers[0], LayerKind::kFullAttention);
  EXPECT_EQ(spec->num_full_attention_layers(), 2);
}

TEST(Config, FamiliesDifferWhereTheyShould) {
  json qwen2 = json::parse(kLlama);
  qwen2["model_type"] = "qwen2";
  qwen2["architectures"] = {"Qwen2ForCausalLM"};
  qwen2["sliding_window"] = 32768;
  qwen2["use_sliding_window"] = false;
  qwen2.erase("head_dim");
  absl::StatusOr<ModelSpec> spec = Parse(qwen2);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->qkv_bias);
  EXPECT_FALSE(spec->output_bias || spec->qk_norm);
  EXPECT_EQ(spec->head_dim, 4);

  json qwen3 = json::parse(kLlama);
  qwen3["model_type"] = "qwen3";
  qwen3["architectures"] = {"Qwen3ForCausalLM"};
  qwen3.erase("head_dim");
  spec = Parse(qwen3);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->qk_norm);
  EXPECT_FALSE(spec->qkv_bias);
  EXPECT_EQ(spec->head_dim, 128);  // the family's default, not hidden / heads
  spec = Parse(With(kLlama, "/attention_bias", true));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->qkv_bias && spec->output_bias);
}

TEST(Config, BothWaysOfWritingARotationAreRead) {
  json config = With(kLlama, "/rope_theta", kRemoved);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1234}};
  EXPECT_EQ(Parse(config)->rope_theta, 1234);
  config["rope_parameters"]["partial_rotary_factor"] = 0.5;
  EXPECT_EQ(Parse(config)->rotary_dim, 2);
  config = With(kLlama, "/rope_scaling", {{"type", "default"}});
  EXPECT_EQ(Parse(config)->rope_theta, 500000.0);
  EXPECT_EQ(Parse(With(kLlama, "/rope_theta", kRemoved))->rope_theta, 1e4);
}

TEST(Config, TyingIsFoundWhereverItStands) {
  json config = json::parse(kHybrid);
  config.erase("tie_word_embeddings");
  const absl::Status none = Parse(config).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.message()), HasSubstr("tie_word_embeddings is missing"));
  config["text_config"]["tie_word_embeddings"] = true;
  EXPECT_TRUE(Parse(config)->tied_embeddings);
  config["tie_word_embeddings"] = false;
  EXPECT_THAT(std::string(Parse(config).status().message()), HasSubstr("differs"));

  std::vector<std::string> warnings;
  absl::StatusOr<ModelSpec> spec = Parse(With(kLlama, "/tie_word_embeddings", kRemoved), &warnings);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->tied_embeddings);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("tie_word_embeddings is missing; taken as false")));
}

TEST(Config, TypesAndEndTokensComeInSeveralForms) {
  EXPECT_EQ(Parse(With(kLlama, "/torch_dtype", "float16"))->weight_type, DType::kF16);
  json config = With(kLlama, "/torch_dtype", kRemoved);
  config["dtype"] = "float32";
  EXPECT_EQ(Parse(config)->weight_type, DType::kF32);
  EXPECT_THAT(Parse(With(kLlama, "/eos_token_id", 7))->eos_token_ids, ElementsAre(7));
  EXPECT_THAT(Parse(With(kLlama, "/eos_token_id", nullptr))->eos_token_ids, IsEmpty());
  config = json::parse(kHybrid);
  config["eos_token_id"] = {5, 6};  // the root's join the text model's
  EXPECT_THAT(Parse(config)->eos_token_ids, ElementsAre(5, 6));
}

TEST(Config, EverythingWrongIsNamed) {
  struct Case {
    const char* base;
    const char* pointer;
    json value;
    const char* message;
  };
  const std::vector<Case> cases = {
      {kLlama, "/hidden_size", kRemoved, "config.json: hidden_size is missing"},
      {kLlama, "/hidden_size", "8", "hidden_size must be a whole number, not \"8\""},
      {kLlama, "/hidden_size", 8.5, "hidden_size must be a whole number"},
      {kLlama, "/hidden_size", 0, "hidden_size is 0"},
      {kLlama, "/hidden_size", -8, "hidden_size is -8"},
      {kLlama, "/hidden_size", 1e300, "hidden_size must be a whole number"},
      {kLlama, "/hidden_size", uint64_t{1} << 63, "hidden_size must be a whole number"},
      {kLlama, "/hidden_size", json::array({8}), "hidden_size must be a whole number, not a list"},
      {kLlama, "/vocab_size", int64_t{1} << 40, "vocab_size is"},
      {kLlama, "/intermediate_size", kRemoved, "intermediate_size is missing"},
      {kLlama, "/max_position_embeddings", 0, "max_position_embeddings is 0"},
      {kLlama, "/num_hidden_layers", 1000000, "num_hidden_layers is"},
      {kLlama, "/num_attention_heads", 0, "num_attention_heads is 0"},
      {kLlama, "/num_attention_heads", kRemoved, "num_attention_heads is missing"},
      {kLlama, "/num_key_value_heads", 3, "num_key_value_heads is 3, which does not divide"},
      {kLlama, "/head_dim", 3, "rotates 3 of 3"},
      {kLlama, "/head_dim", 4096, "head_dim is 4096"},
      {kLlama, "/rms_norm_eps", 0, "rms_norm_eps is 0"},
      {kLlama, "/rms_norm_eps", "1e-6", "rms_norm_eps must be a number"},
      {kLlama, "/rope_theta", -1, "rope_theta is -1"},
      {kLlama, "/rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}}, "is \"yarn\""},
      {kLlama, "/rope_parameters", {{"full_attention", {{"rope_theta", 1}}}}, "per layer type"},
      {kLlama, "/rope_parameters", {{"rope_theta", "x"}}, "rope_theta must be a number"},
      {kLlama, "/hidden_act", "gelu", "hidden_act is \"gelu\""},
      {kLlama, "/mlp_bias", true, "mlp_bias is true"},
      {kLlama, "/attention_bias", "no", "attention_bias must be true or false"},
      {kLlama, "/use_sliding_window", true, "use_sliding_window is true"},
      {kLlama, "/quantization_config", {{"bits", 4}}, "quantization_config is set"},
      {kLlama, "/torch_dtype", "float8", "dtype is \"float8\""},
      {kLlama, "/tie_word_embeddings", 1, "tie_word_embeddings must be true or false"},
      {kLlama, "/eos_token_id", "2", "eos_token_id must be a token id"},
      {kLlama, "/eos_token_id", 16, "eos_token_id 16 is not below vocab_size"},
      {kLlama, "/layer_types", json::array({"full_attention"}), "layer_types has 1 entries"},
      {kLlama, "/layer_types", json::array({"full_attention", "sliding_attention"}),
       "layer_types holds \"sliding_attention\""},
      {kLlama, "/layer_types", json::array({"full_attention", "linear_attention"}),
       "which this model_type does not have"},
      {kLlama, "/model_type", "gpt2", "model_type \"gpt2\" is not supported"},
      {kLlama, "/model_type", 3, "model_type must be a string"},
      {kLlama, "/architectures", json::array({"LlamaForSequenceClassification"}),
       "\"LlamaForSequenceClassification\" is not supported; supported are LlamaForCausalLM"},
      {kHybrid, "/text_config", 5, "text_config must be an object"},
      {kHybrid, "/text_config/hidden_size", kRemoved, "text_config: hidden_size is missing"},
      {kHybrid, "/text_config/linear_num_key_heads", kRemoved, "linear_num_key_heads is missing"},
      {kHybrid, "/text_config/linear_num_value_heads", 0, "linear_num_value_heads is 0"},
      {kHybrid, "/text_config/linear_num_key_heads", 3, "does not divide"},
      {kHybrid, "/text_config/full_attention_interval", 0, "full_attention_interval is 0"},
  };
  for (const Case& c : cases) {
    const absl::Status status = Parse(With(c.base, c.pointer, c.value)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.pointer << " " << c.value;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("config.json"), HasSubstr(c.message)));
  }
  std::vector<std::string> warnings;
  for (const char* text : {"", "{", "[]", "null", "\xff\xfe", "{\"a\":1}"}) {
    EXPECT_EQ(ParseModelConfig(text, "config.json", warnings).status().code(),
              absl::StatusCode::kInvalidArgument)
        << text;
  }
  EXPECT_FALSE(ParseModelConfig(std::string(1 << 20, '['), "config.json", warnings).ok());
}

TEST(Config, GenerationDefaultsAreRead) {
  std::vector<std::string> warnings;
  absl::StatusOr<GenerationDefaults> d = ParseGenerationConfig(
      R"({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
          "eos_token_id": [4, 5], "repetition_penalty": 1.1})",
      "generation_config.json", warnings);
  ASSERT_TRUE(d.ok()) << d.status();
  EXPECT_FLOAT_EQ(d->sampling.temperature, 0.6f);
  EXPECT_FLOAT_EQ(d->sampling.top_p, 0.95f);
  EXPECT_EQ(d->sampling.top_k, 20);
  EXPECT_THAT(d->eos_token_ids, ElementsAre(4, 5));
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("repetition_penalty 1.1 is not applied")));

  warnings.clear();
  d = ParseGenerationConfig("{}", "g", warnings);
  ASSERT_TRUE(d.ok());
  EXPECT_EQ(d->sampling.temperature, 1.0f);
  EXPECT_EQ(d->sampling.top_p, 1.0f);
  EXPECT_EQ(d->sampling.top_k, 0);
  EXPECT_THAT(warnings, IsEmpty());
  d = ParseGenerationConfig(R"({"do_sample": false, "temperature": 0.7})", "g", warnings);
  EXPECT_EQ(d->sampling.temperature, 0.0f);
  for (const char* text :
       {R"({"temperature": -1})", R"({"top_p": 0})", R"({"top_p": 1.5})", R"({"top_k": -1})",
        R"({"do_sample": 1})", R"({"eos_token_id": [-1]})", "[]"}) {
    EXPECT_EQ(ParseGenerationConfig(text, "g", warnings).status().code(),
              absl::StatusCode::kInvalidArgument)
        << text;
  }
}

}  // namespace
}  // namespace qwend
