#include "engine/loader/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "engine/loader/json_fields.h"
#include "engine/models/registry.h"
#include "nlohmann/json.hpp"

namespace qwend {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) {
    return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be read: ", error.message()));
  }
  if (size > static_cast<uintmax_t>(kMaxConfigBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), ": ", size, " bytes are too many for a configuration"));
  }
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  if (size > 0) text << in.rdbuf();
  if (!in) return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be read"));
  return text.str();
}

absl::StatusOr<json> ParseObject(std::string_view text, const std::string& file) {
  json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": is not a JSON object; download the file again"));
  }
  return root;
}

absl::Status Unsupported(const std::string& file, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(
      file, ": ", what, " is not supported; supported are ", SupportedArchitectures()));
}

absl::StatusOr<const Family*> ChooseFamily(JsonFields& root, JsonFields& text,
                                           const std::string& file) {
  std::string model_type = root.String("model_type", "");
  if (model_type.empty()) model_type = text.String("model_type", "");
  std::vector<std::string> architectures = root.Strings("architectures");
  if (!root.status().ok()) return root.status();
  if (!text.status().ok()) return text.status();
  const std::string architecture = architectures.empty() ? "" : architectures[0];
  if (model_type.empty() && architecture.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": model_type is missing"));
  }
  const Family* family = FindFamily(model_type, architecture);
  if (family == nullptr) {
    return Unsupported(file, model_type.empty()
                                 ? absl::StrCat("the architecture \"", architecture, "\"")
                                 : absl::StrCat("the model_type \"", model_type, "\""));
  }
  if (!architecture.empty() && !ServesArchitecture(*family, architecture)) {
    return Unsupported(file, absl::StrCat("the architecture \"", architecture, "\""));
  }
  return family;
}

void ReadLayerTypes(JsonFields& f, ModelSpec& spec) {
  const std::vector<std::string> types = f.Strings("layer_types");
  if (!f.Has("layer_types") || !f.status().ok()) return;
  if (types.size() != spec.layers.size()) {
    f.Fail("layer_types", absl::StrCat("has ", types.size(), " entries, num_hidden_layers is ",
                                       spec.layers.size()));
    return;
  }
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "linear_attention") {
      spec.layers[i] = LayerKind::kLinearAttention;
    } else if (types[i] != "full_attention") {
      f.Fail("layer_types", absl::StrCat("holds \"", types[i].substr(0, 40),
                                         "\"; full_attention and linear_attention are supported"));
      return;
    }
  }
}

// The rotation sits in rope_parameters, or at the top with rope_scaling beside it.
void ReadRope(JsonFields& f, const Family& family, ModelSpec& spec) {
  constexpr double kMaxTheta = 1e12;
  double theta = f.Number("rope_theta", 1.0, kMaxTheta, 1e4);
  double partial = f.Number("partial_rotary_factor", 0.0, 1.0, family.default_partial_rotary);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json* object = f.Object(key);
    if (object == nullptr) continue;
    JsonFields rope(*object, absl::StrCat(f.where(), ": ", key));
    const std::string type = rope.String("rope_type", rope.String("type", "default"));
    if (type != "default") {
      rope.Fail("rope_type", absl::StrCat("is \"", type.substr(0, 40),
                                          "\"; only \"default\" is supported, so serve the model "
                                          "without long-context scaling"));
    }
    for (const char* kind : {"full_attention", "sliding_attention"}) {
      if (rope.Has(kind))
        rope.Fail(kind, "gives a rotation per layer type, which is not supported");
    }
    theta = rope.Number("rope_theta", 1.0, kMaxTheta, theta);
    partial = rope.Number("partial_rotary_factor", 0.0, 1.0, partial);
    f.Adopt(rope.status());
  }
  if (!f.status().ok()) return;
  spec.rope_theta = theta;
  spec.rotary_dim = static_cast<int>(spec.head_dim * partial);
  if (spec.rotary_dim < 2 || spec.rotary_dim % 2 != 0) {
    f.Fail("partial_rotary_factor",
           absl::StrCat("of ", partial, " rotates ", spec.rotary_dim, " of ", spec.head_dim,
                        " elements; it must be an even number above 0"));
  }
}

// The flag may stand at the root, in text_config, or in both.
void ReadTying(JsonFields& root, JsonFields& text, bool nested, const Family& family,
               ModelSpec& spec, std::vector<std::string>& warnings) {
  constexpr const char* kKey = "tie_word_embeddings";
  const bool in_root = root.Has(kKey);
  const bool in_text = nested && text.Has(kKey);
  const bool root_value = root.Bool(kKey, false);
  const bool text_value = in_text && text.Bool(kKey, false);
  if (in_root && in_text && root_value != text_value) {
    text.Fail(kKey, "differs from the one at the root; make them agree");
  }
  if (!in_root && !in_text) {
    if (family.must_state_tying) {
      text.Fail(kKey,
                "is missing, and this family comes with and without; set it to true when "
                "the checkpoint has no lm_head.weight");
    } else {
      warnings.push_back(absl::StrCat(text.where(), ": ", kKey, " is missing; taken as false"));
    }
  }
  spec.tied_embeddings = in_root ? root_value : text_value;
}

void ReadWeightType(JsonFields& root, JsonFields& text, ModelSpec& spec) {
  std::string type;
  for (JsonFields* f : {&text, &root}) {
    if (type.empty()) type = f->String("dtype", f->String("torch_dtype", ""));
  }
  if (type == "float16") {
    spec.weight_type = DType::kF16;
  } else if (type == "float32") {
    spec.weight_type = DType::kF32;
  } else if (type.empty() || type == "bfloat16" || type == "auto") {
    spec.weight_type = DType::kBF16;
  } else {
    text.Fail("dtype", absl::StrCat("is \"", type.substr(0, 40),
                                    "\"; bfloat16, float16 and float32 are supported"));
  }
}

void ReadCommon(JsonFields& f, const Family& family, ModelSpec& spec) {
  spec.family = family.name;
  spec.hidden = static_cast<int>(f.Int("hidden_size", 1, 1 << 16));
  spec.intermediate = static_cast<int>(f.Int("intermediate_size", 1, 1 << 20));
  spec.vocab_size = static_cast<int>(f.Int("vocab_size", 1, 1 << 22));
  spec.max_positions = static_cast<int>(f.Int("max_position_embeddings", 1, 1 << 24));
  spec.rms_eps = static_cast<float>(f.Number("rms_norm_eps", 1e-12, 0.1, 1e-6));
  spec.layers.assign(f.Int("num_hidden_layers", 1, 1024), LayerKind::kFullAttention);
  spec.num_heads = static_cast<int>(f.Int("num_attention_heads", 1, 1024));
  spec.num_kv_heads = static_cast<int>(f.Int("num_key_value_heads", 1, 1024, spec.num_heads));
  if (spec.num_heads % spec.num_kv_heads != 0) {
    f.Fail("num_key_value_heads",
           absl::StrCat("is ", spec.num_kv_heads, ", which does not divide num_attention_heads (",
                        spec.num_heads, ")"));
  }
  int head_dim = family.default_head_dim;
  if (head_dim == 0 && !f.Has("head_dim")) {
    head_dim = spec.hidden / spec.num_heads;
    if (spec.hidden % spec.num_heads != 0) {
      f.Fail("head_dim",
             absl::StrCat("is missing, and hidden_size (", spec.hidden,
                          ") is not a multiple of num_attention_heads (", spec.num_heads, ")"));
    }
  }
  spec.head_dim = static_cast<int>(f.Int("head_dim", 2, 1024, head_dim));

  if (const std::string act = f.String("hidden_act", "silu"); act != "silu") {
    f.Fail("hidden_act", absl::StrCat("is \"", act.substr(0, 40), "\"; only silu is supported"));
  }
  if (f.Bool("use_sliding_window", false)) {
    f.Fail("use_sliding_window", "is true; sliding-window attention is not supported");
  }
  if (f.Has("quantization_config")) {
    f.Fail("quantization_config",
           "is set; quantized checkpoints are not supported, use the bf16, "
           "f16 or f32 one");
  }
}

std::vector<int32_t> Union(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  for (int32_t id : b) {
    if (std::find(a.begin(), a.end(), id) == a.end()) a.push_back(id);
  }
  return a;
}

}  // namespace

absl::StatusOr<ModelSpec> ParseModelConfig(std::string_view text, const std::string& file,
                                           std::vector<std::string>& warnings) {
  absl::StatusOr<json> parsed = ParseObject(text, file);
  if (!parsed.ok()) return parsed.status();
  JsonFields root(*parsed, file);
  const json* nested = root.Object("text_config");
  if (!root.status().ok()) return root.status();
  JsonFields f(nested == nullptr ? *parsed : *nested,
               nested == nullptr ? file : absl::StrCat(file, ": text_config"));

  absl::StatusOr<const Family*> family = ChooseFamily(root, f, file);
  if (!family.ok()) return family.status();
  ModelSpec spec;
  ReadCommon(f, **family, spec);
  if (!f.status().ok()) return f.status();
  ReadLayerTypes(f, spec);
  ReadRope(f, **family, spec);
  ReadTying(root, f, nested != nullptr, **family, spec, warnings);
  ReadWeightType(root, f, spec);
  (*family)->read(f, spec);
  spec.eos_token_ids = Union(f.TokenIds("eos_token_id"), root.TokenIds("eos_token_id"));
  if (spec.num_full_attention_layers() < spec.num_layers() && spec.linear_value_heads == 0) {
    f.Fail("layer_types", "holds linear_attention, which this model_type does not have");
  }
  if (!f.status().ok()) return f.status();
  if (!root.status().ok()) return root.status();
  for (int32_t id : spec.eos_token_ids) {
    if (id >= spec.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          f.where(), ": eos_token_id ", id, " is not below vocab_size (", spec.vocab_size, ")"));
    }
  }
  return spec;
}

absl::StatusOr<GenerationDefaults> ParseGenerationConfig(std::string_view text,
                                                         const std::string& file,
                                                         std::vector<std::string>& warnings) {
  absl::StatusOr<json> parsed = ParseObject(text, file);
  if (!parsed.ok()) return parsed.status();
  JsonFields f(*parsed, file);
  GenerationDefaults defaults;
  SamplingParams& s = defaults.sampling;
  s.temperature = static_cast<float>(f.Number("temperature", 0.0, 100.0, s.temperature));
  s.top_p = static_cast<float>(f.Number("top_p", 1e-6, 1.0, s.top_p));
  s.min_p = static_cast<float>(f.Number("min_p", 0.0, 0.999999, s.min_p));
  s.top_k = static_cast<int>(f.Int("top_k", 0, 1 << 22, s.top_k));
  if (!f.Bool("do_sample", true)) s.temperature = 0.0f;
  defaults.eos_token_ids = f.TokenIds("eos_token_id");
  const double penalty = f.Number("repetition_penalty", 0.0, 100.0, 1.0);
  if (penalty != 1.0) {
    warnings.push_back(absl::StrCat(file, ": repetition_penalty ", penalty, " is not applied"));
  }
  if (!f.status().ok()) return f.status();
  return defaults;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::filesystem::path& dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(
        absl::StrCat(dir.string(),
                     ": is not a folder; --model takes a folder with config.json and safetensors "
                     "files"));
  }
  const std::filesystem::path config_file = dir / "config.json";
  if (!std::filesystem::exists(config_file, error)) {
    return absl::NotFoundError(absl::StrCat(
        config_file.string(), ": is missing; --model takes a Hugging Face model folder"));
  }
  absl::StatusOr<std::string> text = ReadFile(config_file);
  if (!text.ok()) return text.status();
  ModelConfig config;
  absl::StatusOr<ModelSpec> spec = ParseModelConfig(*text, config_file.string(), config.warnings);
  if (!spec.ok()) return spec.status();
  config.spec = *std::move(spec);

  const std::filesystem::path generation_file = dir / "generation_config.json";
  if (!std::filesystem::exists(generation_file, error)) return config;
  text = ReadFile(generation_file);
  if (!text.ok()) return text.status();
  absl::StatusOr<GenerationDefaults> generation =
      ParseGenerationConfig(*text, generation_file.string(), config.warnings);
  if (!generation.ok()) return generation.status();
  config.generation = *std::move(generation);
  for (int32_t id : config.generation.eos_token_ids) {
    if (id >= config.spec.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(generation_file.string(), ": eos_token_id ",
                                                     id, " is not below vocab_size (",
                                                     config.spec.vocab_size, ")"));
    }
  }
  return config;
}

}  // namespace qwend
