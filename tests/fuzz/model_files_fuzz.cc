// Damaged config.json, generation_config.json and safetensors headers: an error that names the
// file, or a result that holds together, never a crash. Each input is read as all three.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loader/config.h"
#include "engine/loader/safetensors.h"
#include "engine/loader/weights.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/json_mutator.h"

using qwend::fuzz::Check;

namespace {

constexpr int64_t kDataBytes = 1000;  // what the seed headers describe

template <typename T>
void CheckError(const absl::StatusOr<T>& result) {
  Check(result.status().code() == absl::StatusCode::kInvalidArgument, "the status of a file");
  Check(result.status().message().find("the-file") == 0, "an error names the file");
}

void CheckSpec(const qwend::ModelSpec& spec) {
  Check(spec.hidden > 0 && spec.vocab_size > 0 && spec.num_layers() > 0, "sizes");
  Check(spec.num_kv_heads > 0 && spec.num_heads % spec.num_kv_heads == 0, "heads");
  Check(spec.rotary_dim > 0 && spec.rotary_dim % 2 == 0 && spec.rotary_dim <= spec.head_dim,
        "the rotation");
  if (spec.num_full_attention_layers() < spec.num_layers()) {
    Check(spec.linear_key_heads > 0 && spec.linear_value_heads % spec.linear_key_heads == 0,
          "linear heads");
  }
  for (const int32_t id : spec.eos_token_ids) Check(id >= 0 && id < spec.vocab_size, "eos ids");
  Check(qwend::CountParameters(spec) > 0, "parameters");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> warnings;
  const auto spec = qwend::ParseModelConfig(text, "the-file", warnings);
  spec.ok() ? CheckSpec(*spec) : CheckError(spec);

  const auto defaults = qwend::ParseGenerationConfig(text, "the-file", warnings);
  if (defaults.ok()) {
    const qwend::SamplingParams& s = defaults->sampling;
    Check(s.temperature >= 0 && s.top_p > 0 && s.top_p <= 1 && s.min_p >= 0 && s.min_p < 1 &&
              s.top_k >= 0,
          "sampling values in range");
  } else {
    CheckError(defaults);
  }

  const auto entries = qwend::ParseSafetensorsHeader(text, kDataBytes, "the-file");
  if (!entries.ok()) {
    CheckError(entries);
    return 0;
  }
  int64_t at = 0;
  for (const qwend::SafetensorsEntry& entry : *entries) {
    Check(entry.begin == at && entry.end >= at, "tensors in order");
    at = entry.end;
  }
  Check(at == kDataBytes, "tensors fill the data");
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  std::string mutated =
      qwend::fuzz::MutateJson(std::string(reinterpret_cast<const char*>(data), size), seed);
  if (mutated.size() > max_size) mutated.resize(max_size);
  std::memcpy(data, mutated.data(), mutated.size());
  return mutated.size();
}
