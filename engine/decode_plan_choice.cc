#include "engine/decode_plan_choice.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace qwend {
namespace {

using Programs = std::vector<std::unique_ptr<Program>>;

constexpr double kMeasureSeconds = 0.2;  // for all buckets together
constexpr int kBlocks = 5;
constexpr double kMaxRuns = 200;  // of a block

// Times runs of one program, the device idle before and after.
class BlockTimer {
 public:
  BlockTimer(Program& program, double block_seconds, const std::function<void()>& synchronize,
             const std::function<double()>& now)
      : program_(program), synchronize_(synchronize), now_(now) {
    Block(1);  // pays for what no later run does
    runs_ = static_cast<int>(std::clamp(block_seconds / std::max(Block(1), 1e-9), 1.0, kMaxRuns));
  }

  void Measure(int block) { seconds_[block] = Block(runs_) / runs_; }

  double Median() {
    std::sort(seconds_.begin(), seconds_.end());
    return seconds_[kBlocks / 2];
  }

 private:
  double Block(int runs) {
    synchronize_();
    const double start = now_();
    for (int i = 0; i < runs; ++i) program_.Run();
    synchronize_();
    return now_() - start;
  }

  Program& program_;
  const std::function<void()>& synchronize_;
  const std::function<double()>& now_;
  int runs_ = 1;
  std::array<double, kBlocks> seconds_{};
};

// Every list in the plan. Empty where the backend cannot do one of them, with the reason.
Programs CompileAll(Backend& backend, DecodePlan plan, std::span<const OpList> lists,
                    StepPort* port, const std::function<void(size_t)>& prepare,
                    std::string& why_not) {
  Programs programs;
  for (size_t i = 0; i < lists.size(); ++i) {
    prepare(i);
    programs.push_back(CompileStep(backend, plan, lists[i].calls(), port, why_not));
    if (programs.back() == nullptr) return {};
  }
  return programs;
}

// The one of both that takes less time a row, summed over the buckets.
DecodePlanChoice Choose(Backend& backend, const Programs& fused, const Programs& persistent,
                        std::span<const int> buckets, const std::function<void(size_t)>& prepare,
                        const std::function<double()>& now) {
  DecodePlanChoice choice;
  choice.measured_buckets.assign(buckets.begin(), buckets.end());
  const double seconds_each = kMeasureSeconds / static_cast<double>(buckets.size());
  for (size_t i = 0; i < buckets.size(); ++i) {
    prepare(i);
    const StepSeconds step = TimeSteps(
        *fused[i], *persistent[i], seconds_each, [&backend] { backend.Synchronize(); }, now);
    choice.fused_seconds_a_row += step.fused / buckets[i];
    choice.persistent_seconds_a_row += step.persistent / buckets[i];
  }
  if (choice.persistent_seconds_a_row < choice.fused_seconds_a_row) {
    choice.plan = DecodePlan::kPersistent;
  }
  return choice;
}

}  // namespace

const char* PlanName(DecodePlan plan) {
  switch (plan) {
    case DecodePlan::kAuto:
      return "auto";
    case DecodePlan::kExplicit:
      return "explicit";
    case DecodePlan::kFused:
      return "fused";
    case DecodePlan::kPersistent:
      return "persistent";
  }
  return "?";
}

std::string DecodePlanChoice::ToString() const {
  std::string out = PlanName(plan);
  if (!measured_buckets.empty()) {
    absl::StrAppendFormat(&out,
                          "; measured over buckets %s: %.1f us a row fused, %.1f us persistent",
                          absl::StrJoin(measured_buckets, ", "), fused_seconds_a_row * 1e6,
                          persistent_seconds_a_row * 1e6);
  }
  if (!why_not_persistent.empty()) {
    absl::StrAppend(&out, "; persistent is not possible: ", why_not_persistent);
  }
  return out;
}

StepSeconds TimeSteps(Program& fused, Program& persistent, double seconds,
                      const std::function<void()>& synchronize,
                      const std::function<double()>& now) {
  const double block_seconds = seconds / (2 * kBlocks);
  BlockTimer fused_timer(fused, block_seconds, synchronize, now);
  BlockTimer persistent_timer(persistent, block_seconds, synchronize, now);
  for (int block = 0; block < kBlocks; ++block) {
    fused_timer.Measure(block);
    persistent_timer.Measure(block);
  }
  return {.fused = fused_timer.Median(), .persistent = persistent_timer.Median()};
}

std::unique_ptr<Program> CompileStep(Backend& backend, DecodePlan plan,
                                     std::span<const OpCall> calls, StepPort* port,
                                     std::string& why_not) {
  return plan == DecodePlan::kPersistent ? backend.CompilePersistent(calls, port, why_not)
                                         : backend.Compile(calls, port);
}

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

absl::StatusOr<DecodePrograms> CompileDecode(Backend& backend, DecodePlan asked,
                                             std::span<const OpList> lists,
                                             std::span<const int> buckets, StepPort* port,
                                             const std::function<void(size_t)>& prepare,
                                             const std::function<double()>& now) {
  DecodePrograms decode;
  std::string why_not;
  if (asked != DecodePlan::kAuto) {
    decode.choice.plan = asked;
    decode.programs = CompileAll(backend, asked, lists, port, prepare, why_not);
    if (!decode.programs.empty()) return decode;
    return absl::FailedPreconditionError(
        absl::StrCat("--decode_plan=persistent: ", why_not, "; use --decode_plan=fused or auto"));
  }
  Programs persistent = CompileAll(backend, DecodePlan::kPersistent, lists, port, prepare, why_not);
  decode.programs = CompileAll(backend, DecodePlan::kFused, lists, port, prepare, why_not);
  if (persistent.empty()) {
    decode.choice.why_not_persistent = why_not;
    return decode;
  }
  decode.choice = Choose(backend, decode.programs, persistent, buckets, prepare, now);
  if (decode.choice.plan == DecodePlan::kPersistent) decode.programs = std::move(persistent);
  return decode;
}

}  // namespace qwend
