// A model of tests/golden or models/ on a backend, ready to run, and the sequences to run it with.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/loader/safetensors.h"
#include "engine/loader/weights.h"
#include "engine/model_runner.h"
#include "kernels/backend.h"

namespace qwend {

// The reference folder of one golden checkpoint, or any other path below the source folder: the one
// of the environment variable QWEND_SOURCE_DIR, or else the one that this was compiled in.
std::filesystem::path GoldenDir(const std::string& name);
std::filesystem::path SourcePath(const std::string& path);

// One tensor of golden.safetensors, as floats; token ids as ints.
struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
  std::vector<int32_t> ids;
  int64_t rows() const { return shape[0]; }
  int64_t row_size() const { return static_cast<int64_t>(values.size()) / shape[0]; }
};

class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path);  // fails the test when it cannot be read
  GoldenTensor Get(const std::string& name) const;
  std::vector<std::string> Names(const std::string& prefix) const;

 private:
  std::unique_ptr<SafetensorsFile> file_;
};

// ||a - b|| / ||b||.
double RelativeError(const float* a, const float* b, int64_t n);

struct TestModelOptions {
  DecodePlan plan = DecodePlan::kFused;
  int max_sequences = 4;
  int max_context = 512;
  int chunk = 192;
  int profile_every = 0;
  int sampleable_tokens = 0;
  int threads = 2;              // of the CPU backend
  std::string backend = "cpu";  // cpu | cuda
  bool decode_ahead = false;
};

// Pages and slot of one sequence. Pages of different sequences interleave, so that an operator that
// takes a neighbour's page gives other numbers.
struct TestSequence {
  std::vector<int32_t> pages;
  int slot = 0;
  SequenceView view() const { return {.pages = pages, .state_slot = slot}; }
};

class TestModel {
 public:
  // Throws std::runtime_error with the status when anything fails.
  explicit TestModel(const std::filesystem::path& dir, TestModelOptions options = {});
  TestModel(const std::filesystem::path& dir, TestModelOptions options,
            std::unique_ptr<Backend> backend);
  TestModel(const ModelSpec& spec, WeightSource& weights, TestModelOptions options = {});

  ModelRunner& runner() { return *runner_; }
  Backend& backend() { return *backend_; }
  const ModelSpec& spec() const { return spec_; }
  const MemoryPlan& plan() const { return plan_; }

  TestSequence Sequence(int slot) const;

  // Logits of every token, `chunk` of them at a time; 0: as many as a prefill takes.
  std::vector<float> PrefillLogits(const TestSequence& sequence, const std::vector<int32_t>& tokens,
                                   int chunk = 0);
  // Prefill, then greedy decoding of this sequence alone: `count` tokens.
  std::vector<int32_t> Greedy(const TestSequence& sequence, const std::vector<int32_t>& prompt,
                              int count);
  // The prompt in whole chunks; returns the sampled token after it.
  int32_t Prefill(const TestSequence& sequence, const std::vector<int32_t>& prompt,
                  const SamplingRow& sampling = {});
  int32_t DecodeOne(const TestSequence& sequence, int32_t token, int position);

 private:
  void Build(WeightSource& weights, const TestModelOptions& options);

  ModelSpec spec_;
  std::unique_ptr<Backend> backend_;
  MemoryPlan plan_;
  std::unique_ptr<ModelRunner> runner_;
};

}  // namespace qwend
