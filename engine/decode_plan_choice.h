// The compiled decode programs of a model, and which plan they follow. One plan serves all batch
// buckets, so that a row's bits do not depend on how many rows run beside it.
//
// --decode_plan=auto has two candidates: fused, which every backend has, and persistent. Persistent
// is the faster one for a row alone, but takes a batch in passes that each read all weights again.
// So both are measured in every bucket on this device and model, about 0.2 s in all, and persistent
// is taken only where its time a row, summed over the buckets, is the smaller. The explicit plan is
// no candidate: it does the fused plan's work in several times as many kernels, and its score
// matrix takes memory that is planned before anything can be measured.
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
  std::vector<int> measured_buckets;     // their rows; empty: not measured
  double fused_seconds_a_row = 0;        // a step's time by its rows, summed over those buckets
  double persistent_seconds_a_row = 0;   // likewise
  std::string why_not_persistent;        // set when auto could not have it
  std::string ToString() const;          // one line for the log
};

// A compiled program for each list, in their order.
struct DecodePrograms {
  DecodePlanChoice choice;
  std::vector<std::unique_ptr<Program>> programs;
};

double SteadySeconds();  // by a clock that only goes forward

// `lists` has the decode step of each of `buckets`, which are their rows: the explicit plan's when
// that is asked for, otherwise the fused plan's, which the persistent one shares. prepare(i) must
// leave inputs on the device that lists[i] may run with at any time; compiling and measuring run
// it, and put nothing into `port`, which is for the programs and may be null. `now` gives seconds.
// FAILED_PRECONDITION with the remedy when the persistent plan was asked for and is not possible.
absl::StatusOr<DecodePrograms> CompileDecode(Backend& backend, DecodePlan asked,
                                             std::span<const OpList> lists,
                                             std::span<const int> buckets, StepPort* port,
                                             const std::function<void(size_t)>& prepare,
                                             const std::function<double()>& now = SteadySeconds);

// A step in one of the plans that exist. `port` may be null. Gives null where the backend cannot,
// with the reason.
std::unique_ptr<Program> CompileStep(Backend& backend, DecodePlan plan,
                                     std::span<const OpCall> calls, StepPort* port,
                                     std::string& why_not);

// Seconds of one run of each program: the median of blocks of runs back to back. The programs take
// turns, so that a device which changes its clock slows both. About `seconds` in all, but never
// less than seven runs of each. `now` gives seconds, `synchronize` waits for the device.
struct StepSeconds {
  double fused = 0;
  double persistent = 0;
};
StepSeconds TimeSteps(Program& fused, Program& persistent, double seconds,
                      const std::function<void()>& synchronize, const std::function<double()>& now);

}  // namespace qwend
