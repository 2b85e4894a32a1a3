#include "engine/models/registry.h"

#include <algorithm>

#include "absl/strings/str_join.h"

namespace qwend {
namespace {

bool Holds(const std::vector<const char*>& list, std::string_view value) {
  return std::any_of(list.begin(), list.end(), [&](const char* s) { return value == s; });
}

}  // namespace

std::span<const Family> Families() {
  static const auto& families = *new std::vector<Family>{
      LlamaFamily(),
      Qwen2Family(),
      Qwen3Family(),
      Qwen35Family(),
  };
  return families;
}

const Family* FindFamily(std::string_view model_type, std::string_view architecture) {
  for (const Family& family : Families()) {
    if (model_type.empty() ? Holds(family.architectures, architecture)
                           : Holds(family.model_types, model_type)) {
      return &family;
    }
  }
  return nullptr;
}

bool ServesArchitecture(const Family& family, std::string_view architecture) {
  return Holds(family.architectures, architecture);
}

std::string SupportedArchitectures() {
  std::vector<std::string> names;
  for (const Family& family : Families()) {
    names.insert(names.end(), family.architectures.begin(), family.architectures.end());
  }
  return absl::StrJoin(names, ", ");
}

std::vector<PublishedShape> PublishedShapes() {
  ModelSpec hybrid;
  hybrid.family = "qwen3_5";
  hybrid.hidden = 1024;
  hybrid.intermediate = 3584;
  hybrid.vocab_size = 248320;
  hybrid.max_positions = 262144;
  hybrid.norm_weight_offset = 1.0f;
  hybrid.tied_embeddings = true;
  for (int i = 0; i < 24; ++i) {
    hybrid.layers.push_back(i % 4 == 3 ? LayerKind::kFullAttention : LayerKind::kLinearAttention);
  }
  hybrid.num_heads = 8;
  hybrid.num_kv_heads = 2;
  hybrid.head_dim = 256;
  hybrid.rotary_dim = 64;
  hybrid.rope_theta = 1e7;
  hybrid.qk_norm = true;
  hybrid.output_gate = true;
  hybrid.linear_key_heads = 16;
  hybrid.linear_value_heads = 16;
  hybrid.linear_key_dim = 128;
  hybrid.linear_value_dim = 128;
  hybrid.conv_width = 4;
  hybrid.eos_token_ids = {248044};

  ModelSpec qwen3;
  qwen3.family = "qwen3";
  qwen3.hidden = 1024;
  qwen3.intermediate = 3072;
  qwen3.vocab_size = 151936;
  qwen3.max_positions = 40960;
  qwen3.tied_embeddings = true;
  qwen3.layers.assign(28, LayerKind::kFullAttention);
  qwen3.num_heads = 16;
  qwen3.num_kv_heads = 8;
  qwen3.head_dim = 128;
  qwen3.rotary_dim = 128;
  qwen3.rope_theta = 1e6;
  qwen3.qk_norm = true;
  qwen3.eos_token_ids = {151645};

  ModelSpec article;
  article.family = "llama";
  article.hidden = 896;
  article.intermediate = 4864;
  article.vocab_size = 151936;
  article.max_positions = 32768;
  article.tied_embeddings = true;
  article.layers.assign(24, LayerKind::kFullAttention);
  article.num_heads = 8;
  article.num_kv_heads = 4;
  article.head_dim = 128;
  article.rotary_dim = 128;

  return {{"qwen3.5-0.8b", hybrid}, {"qwen3-0.6b", qwen3}, {"article-0.8b", article}};
}

}  // namespace qwend
