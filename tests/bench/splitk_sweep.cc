#include "tests/bench/splitk_sweep.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/loader/weights.h"
#include "engine/step_buffers.h"
#include "kernels/backend.h"

namespace qwend::bench {
namespace {

constexpr int kParts[] = {1, 2, 4, 8, 16, 32};
constexpr int64_t kColdBytes = int64_t{512} << 20;  // copies of a matrix that a pass goes through
constexpr int kPasses = 7;

// The distinct projections, {rows, cols}, and how often a step uses each.
std::map<std::pair<int64_t, int64_t>, int> Projections(const ModelSpec& spec) {
  std::map<std::pair<int64_t, int64_t>, int> shapes;
  const auto add = [&](int64_t rows, int64_t cols) { ++shapes[{rows, cols}]; };
  for (LayerKind kind : spec.layers) {
    if (kind == LayerKind::kFullAttention) {
      const int64_t width = int64_t{spec.num_heads} * spec.head_dim;
      add(spec.output_gate ? 2 * width : width, spec.hidden);
      add(int64_t{spec.num_kv_heads} * spec.head_dim, spec.hidden);
      add(int64_t{spec.num_kv_heads} * spec.head_dim, spec.hidden);
      add(spec.hidden, width);
    } else {
      const int64_t values = int64_t{spec.linear_value_heads} * spec.linear_value_dim;
      add(spec.conv_channels(), spec.hidden);
      add(values, spec.hidden);
      add(2 * spec.linear_value_heads, spec.hidden);
      add(spec.hidden, values);
    }
    add(spec.intermediate, spec.hidden);
    add(spec.intermediate, spec.hidden);
    add(spec.hidden, spec.intermediate);
  }
  add(spec.vocab_size, spec.hidden);
  return shapes;
}

class Sweep {
 public:
  explicit Sweep(Backend& backend) : backend_(backend) {}

  // Median seconds of one product in `parts` parts.
  double Time(int64_t rows, int64_t cols, int parts) {
    const int64_t bytes = MemoryCursor::Padded(backend_.PackedBytes(DType::kBF16, rows, cols));
    const auto copies = static_cast<int>(std::max<int64_t>(1, kColdBytes / bytes));
    const int64_t vectors = (cols + rows + rows * parts) * int64_t{sizeof(float)};
    const Buffer memory =
        backend_.Allocate(bytes * copies + vectors + 3 * MemoryCursor::kAlignment);
    MemoryCursor cursor(memory.data());
    const TensorView x = cursor.Tensor(DType::kF32, {1, cols});
    const TensorView out = cursor.Tensor(DType::kF32, {1, rows});
    const TensorView partials = cursor.Tensor(DType::kF32, {parts, 1, rows});
    std::vector<uint16_t> host(rows * cols);
    std::mt19937 random(1);
    for (uint16_t& bits : host)
      bits = static_cast<uint16_t>(0x3c00 + random() % 0x200 + (random() & 1) * 0x8000);
    std::vector<float> input(cols);
    for (float& v : input) v = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
    backend_.CopyToDevice(x.data, input.data(), x.bytes());
    std::vector<OpCall> calls;
    for (int c = 0; c < copies; ++c) {
      const TensorView weight = backend_.Pack(
          TensorView::Of(host.data(), DType::kBF16, {rows, cols}), cursor.Take(bytes));
      calls.push_back({ops::Gemv{.out = out,
                                 .x = x,
                                 .weight = weight,
                                 .partials = parts > 1 ? partials : TensorView{},
                                 .splits = parts},
                       "gemv", -1});
      if (parts > 1)
        calls.push_back({ops::SplitKReduce{.out = out, .partials = partials}, "splitk_reduce", -1});
    }
    const std::unique_ptr<Program> program = backend_.Compile(calls);
    std::vector<double> seconds;
    for (int pass = 0; pass <= kPasses; ++pass) {
      backend_.Synchronize();
      const auto start = std::chrono::steady_clock::now();
      program->Run();
      backend_.Synchronize();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      if (pass > 0) seconds.push_back(taken.count() / copies);
    }
    std::nth_element(seconds.begin(), seconds.begin() + kPasses / 2, seconds.end());
    return seconds[kPasses / 2];
  }

 private:
  Backend& backend_;
};

}  // namespace

absl::StatusOr<std::string> SweepSplitK(const BenchOptions& options) {
  const absl::StatusOr<ModelSpec> spec = SyntheticSpec(options.synthetic);
  if (!spec.ok()) return spec.status();
  try {
    const std::unique_ptr<Backend> backend = options.backend == "cuda"
                                                 ? MakeCudaBackend(options.device)
                                                 : MakeCpuBackend(options.threads);
    std::string table = absl::StrFormat(
        "split-K sweep, %s on %s: microseconds of one product from cold memory, reduction "
        "included\n"
        "%8s %6s %5s",
        options.synthetic, backend->Info().device_name, "rows", "cols", "uses");
    for (int parts : kParts) absl::StrAppendFormat(&table, " %8d", parts);
    absl::StrAppend(&table, "   best  chosen   GB/s at best\n");
    Sweep sweep(*backend);
    for (const auto& [shape, uses] : Projections(*spec)) {
      const auto [rows, cols] = shape;
      absl::StrAppendFormat(&table, "%8d %6d %5d", rows, cols, uses);
      double best = 1e30;
      int best_parts = 1;
      for (int parts : kParts) {
        const double seconds = sweep.Time(rows, cols, parts);
        absl::StrAppendFormat(&table, " %8.2f", seconds * 1e6);
        if (seconds < best) {
          best = seconds;
          best_parts = parts;
        }
      }
      absl::StrAppendFormat(&table, " %6d %7d %14.0f\n", best_parts,
                            GemvSplits(backend->Info().split_k, rows, cols),
                            static_cast<double>(rows) * cols * 2 / best * 1e-9);
    }
    return table;
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("sweep: ", e.what()));
  }
}

}  // namespace qwend::bench
