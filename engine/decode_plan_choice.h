// The compiled decode programs of a model, and which plan they follow. One plan serves all batch
// buckets, so that a row's bits do not depend on how many rows run beside it.
//
// --decode_plan=auto has two candidates: fused, which every backend has, and persistent. Both are
// run for about 0.1 s on this device and model, and the faster one is taken. The explicit plan is
// none: it does the fused plan's work in several times as many kernels, and its score matrix takes
// memory that is planned before anything can be measured.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/op_list.h"
#include "kernels/backend.h"

namespace qwend {

const char* PlanName(DecodePlan plan);  // as --decode_plan takes it

// The plan, and why it is this one.
struct DecodePlanChoice {
  DecodePlan plan = DecodePlan::kFused;  // never kAuto
  double fused_seconds = 0;              // of a step of the smallest bucket; 0: not measured
  double persistent_seconds = 0;         // likewise
  std::string why_not_persistent;        // set when auto could not have it
  std::string ToString() const;          // one line for the log
};

// A compiled program for each list, in their order.
struct DecodePrograms {
  DecodePlanChoice choice;
  std::vector<std::unique_ptr<Program>> programs;
};

// `lists` has one decode step per bucket, the smallest first: the explicit plan's when that is
// asked for, otherwise the fused plan's, which the persistent one shares. prepare(i) must leave
// inputs on the device that lists[i] may run with at any time; compiling and measuring run it.
// FAILED_PRECONDITION with the remedy when the persistent plan was asked for and is not possible.
absl::StatusOr<DecodePrograms> CompileDecode(Backend& backend, DecodePlan asked,
                                             std::span<const OpList> lists,
                                             const std::function<void(size_t)>& prepare);

// A step in one of the plans that exist. Null where the backend cannot, with the reason.
std::unique_ptr<Program> CompileStep(Backend& backend, DecodePlan plan,
                                     std::span<const OpCall> calls, std::string& why_not);

// Seconds of one run of each program: the median of blocks of runs back to back. The programs take
// turns, so that a device which changes its clock slows both. About 0.1 s in all, more where a run
// takes longer than a block should. `now` gives seconds, `synchronize` waits for the device.
struct StepSeconds {
  double fused = 0;
  double persistent = 0;
};
StepSeconds TimeSteps(Program& fused, Program& persistent, const std::function<void()>& synchronize,
                      const std::function<double()>& now);

}  // namespace qwend
