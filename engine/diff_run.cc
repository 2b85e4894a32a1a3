#include "engine/diff_run.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/op_outputs.h"

namespace qwend {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string LayerName(int layer) { return layer < 0 ? "-" : absl::StrCat(layer); }

// "[2, 17]" for the flat index of an element.
std::string IndexString(const std::vector<int64_t>& shape, int64_t flat) {
  std::vector<int64_t> index(shape.size());
  for (size_t d = shape.size(); d-- > 0; flat /= shape[d]) index[d] = flat % shape[d];
  return absl::StrCat("[", absl::StrJoin(index, ", "), "]");
}

bool AllGreedy(Backend& backend, const ops::TokenSampler& sampler, int64_t rows) {
  std::vector<SamplingRow> sampling(rows);
  backend.CopyToHost(sampling.data(), sampler.rows.data,
                     rows * static_cast<int64_t>(sizeof(SamplingRow)));
  return std::all_of(sampling.begin(), sampling.end(),
                     [](const SamplingRow& row) { return row.temperature == 0; });
}

}  // namespace

std::string OpDifference::ToString() const {
  return absl::StrFormat("%s, layer %s, %s %s: relative error %.2e, worst %s", step,
                         LayerName(layer), tag, output, relative_error, worst);
}

const OpDifference* DiffReport::First() const {
  for (const OpDifference& op : operators) {
    if (op.relative_error > tolerance) return &op;
  }
  return nullptr;
}

const OpDifference* DiffReport::Worst() const {
  const auto at = std::max_element(operators.begin(), operators.end(), [](auto& a, auto& b) {
    return a.relative_error < b.relative_error;
  });
  return at == operators.end() ? nullptr : &*at;
}

std::string DiffReport::Summary() const {
  std::string out;
  if (const OpDifference* first = First(); first != nullptr) {
    out = absl::StrCat("first difference: ", first->ToString(), "\n");
  } else {
    out = absl::StrFormat("no operator differs by more than %g\n", tolerance);
  }
  if (const OpDifference* worst = Worst(); worst != nullptr) {
    absl::StrAppend(&out, "worst operator: ", worst->ToString(), "\n");
  }
  absl::StrAppend(&out, operators.size(), " outputs compared, ", unmatched.size(), " unmatched, ",
                  num_ties, " tokens tied\n");
  return out;
}

std::string DiffReport::Table() const {
  std::string out;
  for (const OpDifference& op : operators) {
    absl::StrAppendFormat(&out, "%-12s %3s  %-28s %-9s %.2e\n", op.step, LayerName(op.layer),
                          op.tag, op.output, op.relative_error);
  }
  for (const std::string& name : unmatched) absl::StrAppend(&out, "not compared: ", name, "\n");
  return out;
}

DiffRun::DiffRun(Side reference, Side candidate, double tolerance)
    : reference_(reference), candidate_(candidate), kv_log_(candidate.backend) {
  report_.tolerance = tolerance;
}

void DiffRun::Prefill(const PrefillChunk& chunk) {
  Run(absl::StrCat("prefill ", chunk.start_position), static_cast<int64_t>(chunk.tokens.size()),
      [&](ModelRunner& runner, const ModelRunner::OpObserver& observer) {
        runner.PrefillAllLogits(chunk, observer);
      });
}

void DiffRun::Decode(std::span<const DecodeRow> wanted) {
  std::vector<DecodeRow> rows(wanted.begin(), wanted.end());
  for (DecodeRow& row : rows) row.sampling.keep_logits = 1;  // they are among the outputs
  Run(absl::StrCat("decode ", num_decodes_++), static_cast<int64_t>(rows.size()),
      [&](ModelRunner& runner, const ModelRunner::OpObserver& observer) {
        runner.DecodeEagerly(rows, observer);
      });
}

void DiffRun::Take(Backend& backend, const OpCall& call, int64_t rows, std::string& split,
                   std::vector<Taken>& taken) {
  std::string tag = call.tag;
  if (const auto* gemv = std::get_if<ops::Gemv>(&call.op); gemv != nullptr && gemv->splits > 1) {
    split = call.tag;
    return;
  }
  if (std::holds_alternative<ops::SplitKReduce>(call.op)) tag = split;
  for (const OpOutput& output : OutputsOf(call.op)) {
    const auto first_rows = [&](const TensorView& v, int dim) {
      return v.Slice(dim, 0, std::min(rows, v.dim(dim)));
    };
    const TensorView view = first_rows(output.view, output.row_dim);
    Snapshot values;
    values.shape.assign(view.shape.begin(), view.shape.begin() + view.rank);
    if (view.dtype == DType::kI32) {
      values.ints = ReadInts(backend, view);
    } else {
      values.floats = ReadFloats(backend, view);
    }
    if (output.lengths) values.lengths = ReadInts(backend, first_rows(output.lengths, 0));
    if (const auto* sampler = std::get_if<ops::TokenSampler>(&call.op);
        sampler != nullptr && AllGreedy(backend, *sampler, view.rows())) {
      values.logits =
          ReadFloats(backend, first_rows(sampler->logits, 0).Slice(1, 0, sampler->vocab_limit));
    }
    taken.push_back({.key = {call.layer, tag, output.name}, .values = std::move(values)});
  }
}

template <typename Step>
std::vector<DiffRun::Taken> DiffRun::Observe(const Side& side, int64_t rows, const Step& run,
                                             KvRangeLog* kv_log) {
  std::vector<Taken> taken;
  std::string split;
  run(side.runner, [&](const OpCall& call) {
    if (kv_log != nullptr) kv_log->Observe(call, rows);
    Take(side.backend, call, rows, split, taken);
  });
  return taken;
}

template <typename Step>
void DiffRun::Run(const std::string& name, int64_t rows, const Step& run) {
  const std::vector<Taken> want = Observe(reference_, rows, run, nullptr);
  const std::vector<Taken> got = Observe(candidate_, rows, run, &kv_log_);
  // A key that occurs more often on one side stands for other operators there.
  std::map<Key, std::deque<const Snapshot*>> open;
  std::map<Key, int> surplus;
  for (const Taken& t : want) {
    open[t.key].push_back(&t.values);
    --surplus[t.key];
  }
  for (const Taken& t : got) ++surplus[t.key];
  const auto unmatched = [&](const char* side, const Key& key) {
    const auto& [layer, tag, output] = key;
    report_.unmatched.push_back(absl::StrCat(name, ", layer ", LayerName(layer), ", ", tag, " ",
                                             output, ": the ", side, " has more of them"));
  };
  for (const auto& [key, count] : surplus) {
    if (count != 0) unmatched(count > 0 ? "candidate" : "reference", key);
  }
  for (const Taken& t : got) {
    if (surplus[t.key] != 0) continue;
    const Snapshot& reference = *open[t.key].front();
    open[t.key].pop_front();
    const auto& [layer, tag, output] = t.key;
    Require(reference.shape == t.values.shape, tag, " ", output,
            ": the two runners have other shapes; give them the same model and limits");
    OpDifference difference = Compare(reference, t.values);
    difference.step = name;
    difference.layer = layer;
    difference.tag = tag;
    difference.output = output;
    report_.operators.push_back(std::move(difference));
  }
}

OpDifference DiffRun::Compare(const Snapshot& reference, const Snapshot& candidate) {
  OpDifference result;
  int64_t worst = -1;
  if (!reference.ints.empty()) {
    for (size_t i = 0; i < reference.ints.size(); ++i) {
      if (reference.ints[i] == candidate.ints[i]) continue;
      if (!reference.logits.empty() && IsTie(reference, i, candidate.ints[i])) {
        ++report_.num_ties;
        continue;
      }
      result.relative_error = kInfinity;
      if (worst < 0) worst = static_cast<int64_t>(i);
    }
    const int64_t at = std::max<int64_t>(worst, 0);
    result.worst = absl::StrFormat("%s: %d and %d", IndexString(reference.shape, at),
                                   reference.ints[at], candidate.ints[at]);
    return result;
  }
  const bool scores = !reference.lengths.empty();
  const int64_t columns = scores ? reference.shape.back() : 0;
  const int64_t per_row = scores ? reference.shape[1] * columns : 0;
  double difference = 0;
  double size = 0;
  double worst_distance = -1;
  const auto consider = [&](int64_t i, double distance) {
    if (distance <= worst_distance) return;
    worst_distance = distance;
    worst = i;
  };
  for (int64_t i = 0; i < static_cast<int64_t>(reference.floats.size()); ++i) {
    if (scores && i % columns >= reference.lengths[i / per_row]) continue;
    const double a = reference.floats[i];
    const double b = candidate.floats[i];
    if ((std::isnan(a) && std::isnan(b)) || (std::isinf(a) && a == b)) continue;
    if (!std::isfinite(a) || !std::isfinite(b)) {
      consider(i, kInfinity);
      continue;
    }
    consider(i, std::abs(a - b));
    difference += (a - b) * (a - b);
    size += a * a;
  }
  if (worst_distance == kInfinity) {
    result.relative_error = kInfinity;
  } else if (difference > 0) {
    result.relative_error = size > 0 ? std::sqrt(difference / size) : kInfinity;
  }
  if (worst >= 0) {
    result.worst = absl::StrFormat("%s: %g and %g", IndexString(reference.shape, worst),
                                   reference.floats[worst], candidate.floats[worst]);
  }
  return result;
}

// Whether the reference itself hardly prefers its token: an error of the tolerance in both logits,
// measured against the row's root mean square, could turn the choice round.
bool DiffRun::IsTie(const Snapshot& reference, size_t row, int32_t candidate_token) const {
  const auto vocab = static_cast<int64_t>(reference.logits.size() / reference.ints.size());
  const float* logits = reference.logits.data() + static_cast<int64_t>(row) * vocab;
  const int32_t token = reference.ints[row];
  if (token < 0 || candidate_token < 0 || candidate_token >= vocab) return false;
  double square = 0;
  for (int64_t i = 0; i < vocab; ++i) square += static_cast<double>(logits[i]) * logits[i];
  const double error = report_.tolerance * std::sqrt(square / static_cast<double>(vocab));
  return std::abs(logits[token] - logits[candidate_token]) <= 2 * error && report_.tolerance > 0;
}

}  // namespace qwend
