#include "tests/engine/test_model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace qwend {
namespace {

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) throw std::runtime_error(value.status().ToString());
  return *std::move(value);
}

std::unique_ptr<Backend> MakeBackend(const TestModelOptions& options) {
  return options.backend == "cuda" ? MakeCudaBackend() : MakeCpuBackend(options.threads);
}

}  // namespace

std::filesystem::path SourcePath(const std::string& path) {
  const char* given = std::getenv("QWEND_SOURCE_DIR");
  return std::filesystem::path(given != nullptr ? given : QWEND_SOURCE_DIR) / path;
}

std::filesystem::path GoldenDir(const std::string& name) {
  return SourcePath("tests/golden/" + name);
}

GoldenFile::GoldenFile(const std::filesystem::path& path)
    : file_(Must(SafetensorsFile::Open(path))) {}

GoldenTensor GoldenFile::Get(const std::string& name) const {
  const SafetensorsEntry* entry = file_->Find(name);
  if (entry == nullptr) throw std::runtime_error(file_->path() + " has no " + name);
  GoldenTensor tensor;
  tensor.shape = entry->shape;
  const char* data = file_->Data(*entry);
  const int64_t bytes = entry->end - entry->begin;
  if (entry->type() == DType::kI32) {
    tensor.ids.resize(bytes / 4);
    std::memcpy(tensor.ids.data(), data, bytes);
  } else if (entry->type() == DType::kF32) {
    tensor.values.resize(bytes / 4);
    std::memcpy(tensor.values.data(), data, bytes);
  } else {
    throw std::runtime_error(name + " is " + entry->ShapeString());
  }
  return tensor;
}

std::vector<std::string> GoldenFile::Names(const std::string& prefix) const {
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : file_->entries()) {
    if (entry.name.rfind(prefix, 0) == 0) names.push_back(entry.name);
  }
  return names;
}

double RelativeError(const float* a, const float* b, int64_t n) {
  double difference = 0;
  double size = 0;
  for (int64_t i = 0; i < n; ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference) / std::sqrt(size);  // NaN stays NaN
}

TestModel::TestModel(const std::filesystem::path& dir, TestModelOptions options)
    : TestModel(dir, options, MakeBackend(options)) {}

TestModel::TestModel(const std::filesystem::path& dir, TestModelOptions options,
                     std::unique_ptr<Backend> backend)
    : backend_(std::move(backend)) {
  OpenedModel model = Must(OpenModel(dir));
  spec_ = model.config.spec;
  Build(*model.weights, options);
}

TestModel::TestModel(const ModelSpec& spec, WeightSource& weights, TestModelOptions options)
    : spec_(spec), backend_(MakeBackend(options)) {
  Build(weights, options);
}

void TestModel::Build(WeightSource& weights, const TestModelOptions& options) {
  plan_ = Must(PlanMemory(spec_, *backend_,
                          {.max_sequences = options.max_sequences,
                           .max_context_tokens = options.max_context,
                           .prefill_chunk_tokens = options.chunk,
                           .decode_plan = options.plan}));
  runner_ = Must(ModelRunner::Create(*backend_, spec_, weights,
                                     {.plan = plan_,
                                      .decode_plan = options.plan,
                                      .profile_every = options.profile_every,
                                      .sampleable_tokens = options.sampleable_tokens,
                                      .decode_ahead = options.decode_ahead}));
}

TestSequence TestModel::Sequence(int slot) const {
  TestSequence sequence{.pages = {}, .slot = slot};
  const int pages = (plan_.max_context_tokens + kPageTokens - 1) / kPageTokens;
  for (int i = 0; i < pages; ++i) {
    sequence.pages.push_back((pages - 1 - i) * plan_.max_sequences + slot);
  }
  return sequence;
}

std::vector<float> TestModel::PrefillLogits(const TestSequence& sequence,
                                            const std::vector<int32_t>& tokens, int chunk) {
  const int step = chunk == 0 ? runner_->max_prefill_tokens() : chunk;
  const int n = static_cast<int>(tokens.size());
  std::vector<float> logits;
  for (int start = 0; start < n; start += step) {
    const std::span<const int32_t> part(tokens.data() + start, std::min(step, n - start));
    const std::vector<float> some = runner_->PrefillAllLogits(
        {.sequence = sequence.view(), .tokens = part, .start_position = start, .sampling = {}},
        nullptr);
    logits.insert(logits.end(), some.begin(), some.end());
  }
  return logits;
}

int32_t TestModel::Prefill(const TestSequence& sequence, const std::vector<int32_t>& prompt,
                           const SamplingRow& sampling) {
  const int step = runner_->max_prefill_tokens();
  const int n = static_cast<int>(prompt.size());
  int32_t token = 0;
  for (int start = 0; start < n; start += step) {
    const std::span<const int32_t> part(prompt.data() + start, std::min(step, n - start));
    token = runner_->Prefill({.sequence = sequence.view(),
                              .tokens = part,
                              .start_position = start,
                              .sample = start + step >= n,
                              .sampling = sampling});
  }
  return token;
}

int32_t TestModel::DecodeOne(const TestSequence& sequence, int32_t token, int position) {
  const DecodeRow row{.sequence = sequence.view(),
                      .token = token,
                      .position = position,
                      .sampling = {.keep_logits = 1}};
  return runner_->Decode({&row, 1})[0];
}

std::vector<int32_t> TestModel::Greedy(const TestSequence& sequence,
                                       const std::vector<int32_t>& prompt, int count) {
  std::vector<int32_t> tokens = {Prefill(sequence, prompt)};
  int position = static_cast<int>(prompt.size());
  while (static_cast<int>(tokens.size()) < count) {
    tokens.push_back(DecodeOne(sequence, tokens.back(), position++));
  }
  return tokens;
}

}  // namespace qwend
