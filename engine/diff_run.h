// The same steps on two backends, operator by operator: which operator is the first to give other
// numbers, and how far errors have grown by each of them.
//
// Both runners get the same model, limits and plan (persistent counts as fused). Feed them the same
// ids (teacher forcing), first a prefill, then decode rows; the report grows with every step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "engine/kv_range_log.h"
#include "engine/model_runner.h"
#include "kernels/backend.h"

namespace qwend {

// One output of one operator, compared.
struct OpDifference {
  std::string step;  // "prefill 0" by start position, "decode 3" by count
  int layer = -1;
  std::string tag;
  std::string output;  // the field of the operator: "out", "q", "sum"
  // ||candidate - reference|| / ||reference||. Infinite where integers differ at all, and where one
  // side holds a NaN or an infinity that the other has not.
  double relative_error = 0;
  std::string worst;  // the element that differs most: "[row, column]: reference and candidate"
  std::string ToString() const;
};

struct DiffReport {
  double tolerance = 0;
  std::vector<OpDifference> operators;  // in order of the candidate's steps
  // Outputs that one side has more often in a step, as where the plans differ. Not compared.
  std::vector<std::string> unmatched;
  // Greedy tokens that differ where the reference's own logits lie closer than the tolerance.
  int num_ties = 0;

  const OpDifference* First() const;  // above the tolerance; null when there is none
  const OpDifference* Worst() const;  // null before the first step
  std::string Summary() const;        // the first difference or that there is none; the worst
  std::string Table() const;          // one line an operator
};

class DiffRun {
 public:
  struct Side {
    ModelRunner& runner;
    Backend& backend;
  };
  // Both sides must outlive the run.
  DiffRun(Side reference, Side candidate, double tolerance);

  // std::invalid_argument when the sides' shapes differ. A split projection is compared once its
  // parts are summed, under the tag of the projection. Rows of padding are not compared.
  void Prefill(const PrefillChunk& chunk);
  void Decode(std::span<const DecodeRow> rows);

  const DiffReport& report() const { return report_; }
  const KvRangeLog& kv_log() const { return kv_log_; }  // of the candidate

 private:
  struct Snapshot {
    std::vector<int64_t> shape;
    std::vector<float> floats;     // of a float output
    std::vector<int32_t> ints;     // of an integer one
    std::vector<int32_t> lengths;  // of a score matrix: columns per row
    std::vector<float> logits;     // what a step's greedy tokens were chosen from
  };
  using Key = std::tuple<int, std::string, std::string>;  // layer, tag, output
  struct Taken {
    Key key;
    Snapshot values;
  };

  // Appends what the operator wrote in its first `rows` rows. `split` carries the tag of a split
  // projection to the operator that sums it.
  static void Take(Backend& backend, const OpCall& call, int64_t rows, std::string& split,
                   std::vector<Taken>& taken);
  // run(runner, observer) makes a runner do the step.
  template <typename Step>
  static std::vector<Taken> Observe(const Side& side, int64_t rows, const Step& run,
                                    KvRangeLog* kv_log);
  template <typename Step>
  void Run(const std::string& name, int64_t rows, const Step& run);
  OpDifference Compare(const Snapshot& reference, const Snapshot& candidate);
  bool IsTie(const Snapshot& reference, size_t row, int32_t candidate_token) const;

  Side reference_;
  Side candidate_;
  DiffReport report_;
  KvRangeLog kv_log_;
  int num_decodes_ = 0;
};

}  // namespace qwend
