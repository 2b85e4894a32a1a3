#include "engine/decode_plan_choice.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace qwend {
namespace {

constexpr int kWarmUpRuns = 3;
constexpr int kBlocks = 5;
constexpr double kBlockSeconds = 0.008;
constexpr double kMaxRuns = 200;  // of a block

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Times runs of one program, the device idle before and after.
class BlockTimer {
 public:
  BlockTimer(Program& program, const std::function<void()>& synchronize,
             const std::function<double()>& now)
      : program_(program), synchronize_(synchronize), now_(now) {
    const double each = Block(kWarmUpRuns) / kWarmUpRuns;
    // The first run of all pays for what no later one does.
    const double later = std::min(each, Block(1));
    runs_ = static_cast<int>(std::clamp(kBlockSeconds / std::max(later, 1e-9), 1.0, kMaxRuns));
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

// The faster of fused and persistent for this step, whose inputs are on the device.
DecodePlanChoice Choose(Backend& backend, std::span<const OpCall> calls) {
  DecodePlanChoice choice;
  const std::unique_ptr<Program> persistent =
      backend.CompilePersistent(calls, choice.why_not_persistent);
  if (persistent == nullptr) return choice;
  const std::unique_ptr<Program> fused = backend.Compile(calls);
  const StepSeconds seconds = TimeSteps(
      *fused, *persistent, [&backend] { backend.Synchronize(); }, Now);
  choice.fused_seconds = seconds.fused;
  choice.persistent_seconds = seconds.persistent;
  if (seconds.persistent < seconds.fused) choice.plan = DecodePlan::kPersistent;
  return choice;
}

// Every list in the plan. Empty where the backend cannot do one of them, with the reason.
std::vector<std::unique_ptr<Program>> CompileAll(Backend& backend, DecodePlan plan,
                                                 std::span<const OpList> lists,
                                                 const std::function<void(size_t)>& prepare,
                                                 std::string& why_not) {
  std::vector<std::unique_ptr<Program>> programs;
  for (size_t i = 0; i < lists.size(); ++i) {
    prepare(i);
    programs.push_back(CompileStep(backend, plan, lists[i].calls(), why_not));
    if (programs.back() == nullptr) return {};
  }
  return programs;
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
  if (persistent_seconds > 0) {
    absl::StrAppendFormat(&out, "; measured: %.1f us a step fused, %.1f us persistent",
                          fused_seconds * 1e6, persistent_seconds * 1e6);
  }
  if (!why_not_persistent.empty()) {
    absl::StrAppend(&out, "; persistent is not possible: ", why_not_persistent);
  }
  return out;
}

StepSeconds TimeSteps(Program& fused, Program& persistent, const std::function<void()>& synchronize,
                      const std::function<double()>& now) {
  BlockTimer fused_timer(fused, synchronize, now);
  BlockTimer persistent_timer(persistent, synchronize, now);
  for (int block = 0; block < kBlocks; ++block) {
    fused_timer.Measure(block);
    persistent_timer.Measure(block);
  }
  return {.fused = fused_timer.Median(), .persistent = persistent_timer.Median()};
}

std::unique_ptr<Program> CompileStep(Backend& backend, DecodePlan plan,
                                     std::span<const OpCall> calls, std::string& why_not) {
  return plan == DecodePlan::kPersistent ? backend.CompilePersistent(calls, why_not)
                                         : backend.Compile(calls);
}

absl::StatusOr<DecodePrograms> CompileDecode(Backend& backend, DecodePlan asked,
                                             std::span<const OpList> lists,
                                             const std::function<void(size_t)>& prepare) {
  DecodePrograms decode;
  decode.choice.plan = asked;
  if (asked == DecodePlan::kAuto) {
    prepare(0);
    decode.choice = Choose(backend, lists[0].calls());
  }
  std::string why_not;
  decode.programs = CompileAll(backend, decode.choice.plan, lists, prepare, why_not);
  if (!decode.programs.empty()) return decode;
  if (asked == DecodePlan::kPersistent) {
    return absl::FailedPreconditionError(
        absl::StrCat("--decode_plan=persistent: ", why_not, "; use --decode_plan=fused or auto"));
  }
  decode.choice.plan = DecodePlan::kFused;
  decode.choice.why_not_persistent = why_not;
  decode.programs = CompileAll(backend, DecodePlan::kFused, lists, prepare, why_not);
  return decode;
}

}  // namespace qwend
