// Gemv, its memory and its threads one by one: bytes and multiply-adds per second by shape, what
// packing costs, and a plain read beside them. Weights are taken in turn from more memory than any
// cache holds. Threads: all that the process may use.
//
//   gemv_bench --benchmark_filter=Gemv/6144

#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/machine.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/panels.h"

namespace qwend::cpu {
namespace {

constexpr int64_t kWorkingSet = int64_t{512} << 20;

ThreadPool& Pool() {
  static ThreadPool pool(UsableProcessors());
  return pool;
}

// kWorkingSet bytes of small bf16 numbers, made once.
uint16_t* Weights() {
  static const Buffer buffer = [] {
    Buffer b = AllocateHuge(kWorkingSet);
    auto* values = static_cast<uint16_t*>(b.data());
    Pool().ParallelFor(kWorkingSet / 2, 1 << 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        values[i] = static_cast<uint16_t>(0x3c00 | (i * 2654435761u >> 16 & 0x80ff));
      }
    });
    return b;
  }();
  return static_cast<uint16_t*>(buffer.data());
}

void EmptyLoop(benchmark::State& state) {
  for (auto _ : state) Pool().ParallelFor(64, 1, [](int64_t, int64_t, int) {});
}
BENCHMARK(EmptyLoop)->UseRealTime();

void PlainRead(benchmark::State& state) {
  double best = 0;
  for (auto _ : state) best = std::max(best, MeasureReadBandwidth(Pool()));
  state.counters["best_GB/s"] = best / 1e9;
}
BENCHMARK(PlainRead)->Iterations(1)->UseRealTime()->Unit(benchmark::kMillisecond);

void RunGemv(benchmark::State& state, Layout layout) {
  const int64_t n = state.range(0);
  const int64_t k = state.range(1);
  const int64_t rows = state.range(2);
  const int64_t bytes = PanelBytes(DType::kBF16, n, k);
  const int64_t copies = std::max<int64_t>(1, kWorkingSet / bytes);
  std::vector<float> x(static_cast<size_t>(rows * k), 0.5f);
  std::vector<float> out(static_cast<size_t>(rows * n));
  ops::Gemv gemv;
  gemv.out = TensorView::Of(out.data(), DType::kF32, {rows, n});
  gemv.x = TensorView::Of(x.data(), DType::kF32, {rows, k});
  int64_t copy = 0;
  for (auto _ : state) {
    gemv.weight = TensorView::Of(Weights() + copy * bytes / 2, DType::kBF16, {n, k});
    gemv.weight.layout = layout;
    Run(gemv, {Pool()});
    copy = (copy + 1) % copies;
  }
  const auto runs = static_cast<double>(state.iterations());
  state.counters["GB/s"] =
      benchmark::Counter(runs * static_cast<double>(bytes) / 1e9, benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] = benchmark::Counter(runs * 2 * static_cast<double>(n * k * rows) / 1e9,
                                                 benchmark::Counter::kIsRate);
}
void Gemv(benchmark::State& state) { RunGemv(state, Layout::kCpuPanels); }
void GemvRowMajor(benchmark::State& state) { RunGemv(state, Layout::kRowMajor); }

// The matrices of Qwen3.5-0.8B.
void Shapes(benchmark::internal::Benchmark* b) {
  for (const int64_t rows : {1, 8, 512}) {
    for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{{6144, 1024},
                                                                       {4096, 1024},
                                                                       {3584, 1024},
                                                                       {2048, 1024},
                                                                       {512, 1024},
                                                                       {32, 1024},
                                                                       {1024, 2048},
                                                                       {1024, 3584},
                                                                       {248320, 1024}}) {
      if (rows < 512 || n < 100000) b->Args({n, k, rows});
    }
  }
}
BENCHMARK(Gemv)->Apply(Shapes)->UseRealTime()->Unit(benchmark::kMicrosecond);
BENCHMARK(GemvRowMajor)
    ->Args({6144, 1024, 1})
    ->Args({1024, 3584, 1})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

// Packing from a mapped file into fresh huge pages, as at start-up.
void PackMappedFile(benchmark::State& state) {
  constexpr int64_t kRows = 65536;
  constexpr int64_t kCols = 1024;
  constexpr size_t kBytes = kRows * kCols * 2;
  std::FILE* file = std::tmpfile();
  if (file == nullptr || std::fwrite(Weights(), 1, kBytes, file) != kBytes ||
      std::fflush(file) != 0) {
    state.SkipWithError("cannot write a temporary file");
    return;
  }
  void* mapped = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fileno(file), 0);
  if (mapped == MAP_FAILED) {
    state.SkipWithError("cannot map a temporary file");
    return;
  }
  const TensorView host = TensorView::Of(mapped, DType::kBF16, {kRows, kCols});
  for (auto _ : state) {
    const Buffer packed = AllocateHuge(PanelBytes(DType::kBF16, kRows, kCols));
    auto* to = static_cast<char*>(packed.data());
    Pool().ParallelFor(PanelCount(kRows), 1, [&](int64_t begin, int64_t end, int) {
      PackPanelRange(host, DType::kBF16, begin, end, to + PanelOffset(DType::kBF16, kCols, begin));
    });
    madvise(mapped, kBytes, MADV_DONTNEED);
  }
  state.counters["GB/s"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * kBytes / 1e9, benchmark::Counter::kIsRate);
  munmap(mapped, kBytes);
  std::fclose(file);
}
BENCHMARK(PackMappedFile)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace qwend::cpu

BENCHMARK_MAIN();
