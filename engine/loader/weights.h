// Where a model's weights come from: a checkpoint's safetensors files, or a generator.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/loader/config.h"
#include "engine/models/model_spec.h"
#include "kernels/tensor.h"

namespace qwend {

// Names are canonical: Hugging Face's without the prefix of the text model ("embed_tokens.weight",
// "layers.3.self_attn.q_proj.weight", "norm.weight", "lm_head.weight"); ModelTensors lists them.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Row-major in host memory: bf16, f16 or f32. Valid until the next Get, which drops its pages, so
  // that no more than one tensor is ever held beside the packed weights. NOT_FOUND for a name that
  // ModelTensors does not list.
  virtual absl::StatusOr<TensorView> Get(std::string_view name) = 0;
  // The type to keep the projections in: the one they all have, or f32 when they differ.
  virtual DType weight_type() const = 0;
};

// Opens the files that model.safetensors.index.json names; without an index model.safetensors, or
// else every *.safetensors of the folder. Checks that every tensor of the spec is there with its
// shape and a float type, that each file is whole, and that no tensor of the text model is left
// over (vision, multi-token prediction and rotary tables are skipped). Errors name file and tensor.
absl::StatusOr<std::unique_ptr<WeightSource>> OpenSafetensors(const std::filesystem::path& dir,
                                                              const ModelSpec& spec);

// A model folder ready to be planned and uploaded: LoadModelConfig and OpenSafetensors, with
// config.spec.weight_type set to what the tensors are stored in.
struct OpenedModel {
  ModelConfig config;
  std::unique_ptr<WeightSource> weights;
};
absl::StatusOr<OpenedModel> OpenModel(const std::filesystem::path& dir);

// Random weights of the full shape, made tensor by tensor: norms near identity, projections scaled
// so that activations keep their size, decays and gates spread out. The same seed gives the same
// bits.
std::unique_ptr<WeightSource> MakeSyntheticWeights(const ModelSpec& spec, uint64_t seed);

// One of PublishedShapes (engine/models/registry.h) by its name; INVALID_ARGUMENT lists them.
absl::StatusOr<ModelSpec> SyntheticSpec(std::string_view name);

// Weights of the text model, tied ones counted once.
uint64_t CountParameters(const ModelSpec& spec);

}  // namespace qwend
