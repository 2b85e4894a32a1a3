// Runs a model folder on one backend, for a script to compare or a person to read.
//
// model_probe logits MODEL BACKEND PLAN IDS OUT
//   Teacher-forced logits to OUT, f32 [2, n, vocab]: decoded one by one after a one-token prompt,
//   then by a prefill of all, in as few chunks as it takes.
// model_probe greedy MODEL BACKEND PLAN IDS N
//   N greedy tokens after the prompt, one line of ids.
// model_probe replay MODEL BACKEND PLAN IDS N
//   N decode steps, in rounds from the same state: bits and device memory must stay. Every 10,000
//   steps, and at the end, a line with the mean and the longest step so far.
// model_probe bits MODEL BACKEND PLAN IDS N [GROWTH]
//   N greedy decode steps of eight sequences in one batch, of the first and the last alone, and the
//   first 50 steps of two and of four: their logits must have the same bits. A line with a hash of
//   all eight's, which another run must print too. The prompt of sequence i, from 0 on, is the ids
//   1 + i * GROWTH times (0).
// model_probe fault MODEL BACKEND PLAN IDS
//   A decode step that reads where no memory is: the device's error must come out within 5 s.
// model_probe diff MODEL BACKEND PLAN IDS TOLERANCE [table] [log]
//   Prefill, then teacher-forced decode of the last ids, on the CPU and on BACKEND, operator by
//   operator: the first that differs by more than TOLERANCE, and the worst. "table" adds a line per
//   operator, "log" a line per read or write of the KV pages. With the persistent plan the
//   operators are those of its list, which the fused plan's kernels run.
//
// BACKEND is cpu or cuda, PLAN explicit, fused, persistent or auto, IDS a file of little-endian
// int32. Exit code 1 with one line on an error or a failed check.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/diff_run.h"
#include "engine/loader/weights.h"
#include "engine/memory_plan.h"
#include "engine/model_runner.h"
#include "tests/gpu/probe_arguments.h"

namespace qwend {
namespace {

constexpr int kReplayRound = 100;  // steps from one prompt before it is prefilled again
constexpr int kSequences = 8;      // of bits
constexpr int kDiffDecodes = 8;    // ids that diff decodes, after a prefill of the others

struct Probe {
  std::unique_ptr<Backend> backend;
  OpenedModel model;
  std::unique_ptr<ModelRunner> runner;
  std::vector<std::vector<int32_t>> pages;  // each sequence's

  Probe(const std::string& dir, const std::string& backend_name, const std::string& plan_name,
        int context, int sequences = 1)
      : pages(sequences) {
    if (backend_name != "cuda" && backend_name != "cpu")
      Die("BACKEND is '" + backend_name + "'; it must be cpu or cuda");
    backend = backend_name == "cuda" ? MakeCudaBackend() : MakeCpuBackend();
    model = OrDie(OpenModel(dir));
    MemoryLimits limits{.max_sequences = sequences, .max_context_tokens = context};
    limits.decode_plan = ReadPlan(plan_name);
    RunnerOptions options{.plan = OrDie(PlanMemory(model.config.spec, *backend, limits)),
                          .decode_plan = limits.decode_plan,
                          .profile_every = 0};
    runner = OrDie(ModelRunner::Create(*backend, model.config.spec, *model.weights, options));
    int32_t page = 0;
    for (std::vector<int32_t>& of_sequence : pages) {
      for (int i = 0; i * kPageTokens < context; ++i) of_sequence.push_back(page++);
    }
  }

  PrefillChunk Chunk(const std::vector<int32_t>& ids, int begin, int end, int sequence = 0) const {
    return {.sequence = {.pages = pages[sequence], .state_slot = sequence},
            .tokens = std::span<const int32_t>(ids).subspan(begin, end - begin),
            .start_position = begin,
            .sample = end == static_cast<int>(ids.size()),
            .sampling = {}};
  }

  int32_t PrefillAll(const std::vector<int32_t>& ids, int sequence = 0) {
    int32_t token = 0;
    const int size = runner->max_prefill_tokens();
    for (int begin = 0; begin < static_cast<int>(ids.size()); begin += size) {
      token = runner->Prefill(Chunk(ids, begin, std::min<int>(begin + size, ids.size()), sequence));
    }
    return token;
  }

  DecodeRow Row(int32_t token, int position, int sequence = 0) const {
    return {.sequence = {.pages = pages[sequence], .state_slot = sequence},
            .token = token,
            .position = position,
            .sampling = {.keep_logits = 1}};
  }

  int32_t DecodeOne(int32_t token, int position) {
    const DecodeRow row = Row(token, position);
    return runner->Decode({&row, 1})[0];
  }
};

void Logits(Probe& probe, const std::vector<int32_t>& ids, const std::string& out) {
  const std::vector<int32_t> first(ids.begin(), ids.begin() + 1);
  std::vector<float> all = probe.runner->PrefillAllLogits(probe.Chunk(first, 0, 1), nullptr);
  for (size_t i = 1; i < ids.size(); ++i) {
    probe.DecodeOne(ids[i], static_cast<int>(i));
    const std::vector<float> row = probe.runner->LastDecodeLogits(1);
    all.insert(all.end(), row.begin(), row.end());
  }
  const int size = probe.runner->max_prefill_tokens(), count = static_cast<int>(ids.size());
  for (int begin = 0; begin < count; begin += size) {
    const std::vector<float> rows = probe.runner->PrefillAllLogits(
        probe.Chunk(ids, begin, std::min(begin + size, count)), nullptr);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  std::ofstream file(out, std::ios::binary);
  file.write(reinterpret_cast<const char*>(all.data()),
             static_cast<std::streamsize>(all.size() * sizeof(float)));
  if (!file) Die(out + ": cannot be written");
}

void Greedy(Probe& probe, const std::vector<int32_t>& ids, int count) {
  int32_t token = probe.PrefillAll(ids);
  for (int i = 0; i < count; ++i) {
    if (token == kInvalidToken)
      Die("logits are not finite at generated token " + std::to_string(i));
    std::printf("%d ", token);
    token = probe.DecodeOne(token, static_cast<int>(ids.size()) + i);
  }
  std::printf("\n");
}

// How long steps take, the reading of their token included.
class StepTimes {
 public:
  void Begin() { start_ = Clock::now(); }
  void End() {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    sum_ += seconds;
    longest_ = std::max(longest_, seconds);
    if (++steps_ % kProgress == 0) Print();
  }
  // Nothing when the last step has just printed it.
  void Finish() const {
    if (steps_ % kProgress != 0) Print();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kProgress = 10000;

  void Print() const {
    std::printf("%d steps, mean %.1f us, longest %.1f us\n", steps_, sum_ / steps_ * 1e6,
                longest_ * 1e6);
    std::fflush(stdout);
  }

  Clock::time_point start_;
  double sum_ = 0, longest_ = 0;
  int steps_ = 0;
};

// The recurrent state moves on with every step, so each round starts again from the prompt; within
// a round the steps must repeat the first round's bits.
void Replay(Probe& probe, const std::vector<int32_t>& ids, int count) {
  const int64_t allocations = probe.backend->AllocationCount();
  const int64_t free_before = probe.backend->Info().free_bytes;
  std::vector<std::vector<float>> first;
  StepTimes times;
  for (int done = 0, round = 0; done < count; ++round) {
    int32_t token = probe.PrefillAll(ids);
    for (int step = 0; step < kReplayRound; ++step, ++done) {
      times.Begin();
      token = probe.DecodeOne(token, static_cast<int>(ids.size()) + step);
      times.End();
      if (step % 25 != 24) continue;
      std::vector<float> logits = probe.runner->LastDecodeLogits(1);
      const size_t at = step / 25;
      if (round == 0) {
        first.push_back(std::move(logits));
      } else if (std::memcmp(first[at].data(), logits.data(), logits.size() * sizeof(float)) != 0) {
        Die("round " + std::to_string(round) + ", step " + std::to_string(step) +
            ": the bits changed");
      }
    }
  }
  times.Finish();
  if (probe.backend->AllocationCount() != allocations)
    Die("device memory was allocated after the model was ready");
  const int64_t drift = free_before - probe.backend->Info().free_bytes;
  std::printf("replays %d, bits equal, allocations 0, device memory drift %lld bytes\n", count,
              static_cast<long long>(drift));
  if (drift > (1 << 20)) Die("device memory drifts");
}

// FNV-1a over the bits of one row of logits.
uint64_t Hash(const float* logits, size_t count) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, &logits[i], sizeof(bits));
    hash = (hash ^ bits) * 0x100000001b3u;
  }
  return hash;
}

// Greedy decoding of some sequences side by side, each from the ids turned by its number and
// repeated by it: the hash of each step's logits, sequence by sequence.
std::vector<std::vector<uint64_t>> HashSteps(Probe& probe, const std::vector<int32_t>& ids,
                                             const std::vector<int>& sequences, int count,
                                             int growth) {
  const auto length = [&](int s) { return static_cast<int>(ids.size()) * (1 + s * growth); };
  std::vector<int32_t> tokens;
  for (int s : sequences) {
    std::vector<int32_t> turned = ids;
    std::rotate(turned.begin(), turned.begin() + s % static_cast<int>(ids.size()), turned.end());
    while (static_cast<int>(turned.size()) < length(s))
      turned.push_back(turned[turned.size() - ids.size()]);
    tokens.push_back(probe.PrefillAll(turned, s));
  }
  std::vector<std::vector<uint64_t>> hashes(sequences.size());
  for (int step = 0; step < count; ++step) {
    std::vector<DecodeRow> rows;
    for (size_t i = 0; i < sequences.size(); ++i)
      rows.push_back(probe.Row(tokens[i], length(sequences[i]) + step, sequences[i]));
    const std::span<const int32_t> next = probe.runner->Decode(rows);
    tokens.assign(next.begin(), next.end());
    const std::vector<float> logits =
        probe.runner->LastDecodeLogits(static_cast<int>(sequences.size()));
    const size_t vocab = logits.size() / sequences.size();
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (tokens[i] == kInvalidToken) Die("logits are not finite at step " + std::to_string(step));
      hashes[i].push_back(Hash(logits.data() + i * vocab, vocab));
    }
  }
  return hashes;
}

void Bits(Probe& probe, const std::vector<int32_t>& ids, int count, int growth) {
  std::vector<int> all(kSequences);
  std::iota(all.begin(), all.end(), 0);
  const auto together = HashSteps(probe, ids, all, count, growth);
  const int few = std::min(count, 50);
  for (const auto& [members, steps] : {std::pair<std::vector<int>, int>{{0}, count},
                                       {{7}, count},
                                       {{7, 0}, few},
                                       {{0, 7, 1, 4}, few}}) {
    const auto hashes = HashSteps(probe, ids, members, steps, growth);
    for (size_t i = 0; i < members.size(); ++i) {
      for (int step = 0; step < steps; ++step) {
        if (hashes[i][step] != together[members[i]][step])
          Die("sequence " + std::to_string(members[i]) + ", step " + std::to_string(step) +
              ": other bits in a batch of " + std::to_string(members.size()) + " than in one of " +
              std::to_string(kSequences));
      }
    }
  }
  static_assert(kSequences == 8);
  uint64_t hash = 0;
  for (const std::vector<uint64_t>& of_sequence : together) {
    for (uint64_t h : of_sequence) hash = (hash ^ h) * 0x100000001b3u;
  }
  std::printf("%d steps, the same bits alone and in batches of 2, 4 and %d; hash %016llx\n", count,
              kSequences, static_cast<unsigned long long>(hash));
}

void Fault(Probe& probe, const std::vector<int32_t>& ids) {
  const int32_t token = probe.PrefillAll(ids);
  probe.pages[0].assign(probe.pages[0].size(), 1 << 20);
  const auto start = std::chrono::steady_clock::now();
  try {
    probe.DecodeOne(token, static_cast<int>(ids.size()));
  } catch (const DeviceError& e) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("after %.2f s: %s\n", took.count(), e.what());
    std::fflush(stdout);
    // Not a kernel that waited for itself until it gave up. The device's memory is past giving
    // back.
    std::_Exit(std::strstr(e.what(), "IllegalAddress") != nullptr && took.count() < 5 ? 0 : 1);
  }
  Die("a step read where no memory is, and nobody said so");
}

// The CPU and the probe's backend side by side.
void Diff(Probe& cpu, Probe& probe, const std::vector<int32_t>& ids, double tolerance,
          const std::set<std::string>& wanted) {
  const int n = static_cast<int>(ids.size());
  const int prompt = std::max(1, n - kDiffDecodes);
  DiffRun run({*cpu.runner, *cpu.backend}, {*probe.runner, *probe.backend}, tolerance);
  const int size = probe.runner->max_prefill_tokens();
  for (int begin = 0; begin < prompt; begin += size) {
    run.Prefill(probe.Chunk(ids, begin, std::min(begin + size, prompt)));
  }
  for (int i = prompt; i < n; ++i) {
    const DecodeRow row = probe.Row(ids[i], i);
    run.Decode({&row, 1});
  }
  if (wanted.count("table") != 0) std::printf("%s", run.report().Table().c_str());
  if (wanted.count("log") != 0) std::printf("%s", run.kv_log().ToString().c_str());
  std::printf("%s", run.report().Summary().c_str());
  std::fflush(stdout);
  if (!run.kv_log().violations().empty()) Die("KV pages: " + run.kv_log().violations().front());
  if (run.report().First() != nullptr) Die("the backends differ");
  if (run.report().operators.empty()) Die("nothing was compared");
  if (!run.report().unmatched.empty()) Die("not compared: " + run.report().unmatched.front());
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "fault" ? argc != 6
                      : argc < 7 || (argc > 7 && mode != "diff" && (argc > 8 || mode != "bits"))) {
    Die("usage:\n"
        "  model_probe logits MODEL BACKEND PLAN IDS OUT\n"
        "  model_probe greedy MODEL BACKEND PLAN IDS N\n"
        "  model_probe replay MODEL BACKEND PLAN IDS N\n"
        "  model_probe bits   MODEL BACKEND PLAN IDS N [GROWTH]\n"
        "  model_probe fault  MODEL BACKEND PLAN IDS\n"
        "  model_probe diff   MODEL BACKEND PLAN IDS TOLERANCE [table] [log]\n"
        "BACKEND: cpu or cuda; PLAN: explicit, fused, persistent or auto; "
        "IDS: a file of little-endian int32");
  }
  if (mode == "fault" && argv[3] != std::string("cuda")) Die("fault is for BACKEND cuda");
  const std::string last = argc > 6 ? argv[6] : "";
  const std::vector<int32_t> ids = ReadIds(argv[5]);
  const bool counts = mode == "greedy" || mode == "replay" || mode == "bits";
  // A replay compares its second round with its first.
  const int count = counts ? Count("N", last, mode == "replay" ? 2 * kReplayRound : 1) : 0;
  const int steps = mode == "greedy" || mode == "bits" ? count
                    : mode == "replay"                 ? kReplayRound
                                                       : 0;
  const int growth = argc > 7 && mode == "bits" ? Count("GROWTH", argv[7], 0) : 0;
  const int64_t tokens =
      static_cast<int64_t>(ids.size()) * (1 + (kSequences - 1) * int64_t{growth}) + steps + 1;
  if (tokens > std::numeric_limits<int>::max())
    Die("N is " + last + " and GROWTH " + std::to_string(growth) + ", more than a context holds");
  const auto context = static_cast<int>(tokens);
  Probe probe(argv[2], argv[3], argv[4], context, mode == "bits" ? kSequences : 1);
  if (mode == "logits") {
    Logits(probe, ids, last);
  } else if (mode == "greedy") {
    Greedy(probe, ids, count);
  } else if (mode == "replay") {
    Replay(probe, ids, count);
  } else if (mode == "bits") {
    Bits(probe, ids, count, growth);
  } else if (mode == "fault") {
    Fault(probe, ids);
  } else if (mode == "diff") {
    const std::set<std::string> wanted(argv + 7, argv + argc);
    for (const std::string& word : wanted) {
      if (word != "table" && word != "log") Die("'" + word + "' is neither table nor log");
    }
    const double tolerance = Number("TOLERANCE", last, 0);
    // The CPU has no persistent plan, but the plan's list of operators.
    const std::string plan = argv[4];
    Probe cpu(argv[2], "cpu", plan == "persistent" ? "fused" : plan, context);
    Diff(cpu, probe, ids, tolerance, wanted);
  } else {
    Die("unknown mode " + mode);
  }
  return 0;
}

}  // namespace
}  // namespace qwend

int main(int argc, char** argv) {
  try {
    return qwend::Main(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "model_probe: %s\n", e.what());
    return 1;
  }
}
