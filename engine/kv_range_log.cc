#include "engine/kv_range_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/op_outputs.h"

namespace qwend {
namespace {

using Run = std::pair<int64_t, int64_t>;  // [begin, end) in bytes

std::string Where(const OpCall& call) { return absl::StrCat("layer ", call.layer, " ", call.tag); }

int64_t NumSlots(const TensorView& pages) { return pages.dim(0) * kPageTokens; }

// The bytes of the slots of all heads, ascending, neighbours joined.
std::vector<Run> RunsOf(const TensorView& pages, const std::vector<int64_t>& slots) {
  const int64_t size = SizeOf(pages.dtype);
  std::vector<Run> runs;
  for (const int64_t slot : slots) {
    const int64_t page = slot >> 6;  // rounds down below zero too
    static_assert(kPageTokens == 1 << 6);
    for (int64_t head = 0; head < pages.dim(1); ++head) {
      const int64_t begin = (page * pages.strides[0] + head * pages.strides[1] +
                             (slot - page * kPageTokens) * pages.strides[2]) *
                            size;
      runs.emplace_back(begin, begin + pages.dim(3) * size);
    }
  }
  std::sort(runs.begin(), runs.end());
  std::vector<Run> joined;
  for (const Run& run : runs) {
    if (!joined.empty() && run.first <= joined.back().second) {
      joined.back().second = std::max(joined.back().second, run.second);
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

}  // namespace

std::string KvAccess::ToString() const {
  return absl::StrCat("layer ", layer, " ", tag, " ", writes ? "writes" : "reads", " ",
                      std::string(1, pool), " [", begin, ", ", end, "), ", bytes, " bytes in ",
                      num_runs, num_runs == 1 ? " run" : " runs");
}

void KvRangeLog::Observe(const OpCall& call, int64_t rows) {
  if (const auto* update = std::get_if<ops::KvCacheUpdate>(&call.op)) {
    const std::vector<int32_t> slots =
        ReadInts(backend_, update->slots.Slice(0, 0, std::min(rows, update->slots.rows())));
    const std::vector<int64_t> wide(slots.begin(), slots.end());
    Write(call, 'k', update->k_pages, wide);
    Write(call, 'v', update->v_pages, wide);
  } else if (const auto* dot = std::get_if<ops::QkDot>(&call.op)) {
    Read(call, 'k', dot->k_pages, Lengths(dot->lengths, rows), dot->sequences);
  } else if (const auto* mix = std::get_if<ops::PvDot>(&call.op)) {
    Read(call, 'v', mix->v_pages, Lengths(mix->lengths, rows), mix->sequences);
  } else if (const auto* attention = std::get_if<ops::Attention>(&call.op)) {
    const ops::Attention& a = *attention;
    Read(call, 'k', a.k_pages, Lengths(a.lengths, rows), a.sequences);
    Read(call, 'v', a.v_pages, Lengths(a.lengths, rows), a.sequences);
  } else if (const auto* fused = std::get_if<ops::DecodeAttention>(&call.op)) {
    ObserveFused(call, *fused, rows);
  }
}

// A fused kernel knows slots and lengths from the positions; nobody writes them down.
void KvRangeLog::ObserveFused(const OpCall& call, const ops::DecodeAttention& op, int64_t rows) {
  const StepSequences& s = op.attention.sequences;
  rows = std::min(rows, s.positions.rows());
  std::vector<int32_t> lengths = ReadInts(backend_, s.positions.Slice(0, 0, rows));
  const std::vector<int32_t> sequence_of = ReadInts(backend_, s.row_sequence.Slice(0, 0, rows));
  const std::vector<int32_t> table = ReadInts(backend_, s.block_table);
  std::vector<int64_t> slots;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = lengths[row]++;
    const int64_t page = table[sequence_of[row] * s.block_table.cols() + position / kPageTokens];
    slots.push_back(page * kPageTokens + position % kPageTokens);
  }
  Write(call, 'k', op.update.k_pages, slots);
  Write(call, 'v', op.update.v_pages, slots);
  Read(call, 'k', op.update.k_pages, lengths, s);
  Read(call, 'v', op.update.v_pages, lengths, s);
}

std::string KvRangeLog::ToString() const {
  std::string out;
  for (const KvAccess& access : accesses_) absl::StrAppend(&out, access.ToString(), "\n");
  for (const std::string& violation : violations_) {
    absl::StrAppend(&out, "VIOLATION: ", violation, "\n");
  }
  return out;
}

std::vector<int32_t> KvRangeLog::Lengths(const TensorView& lengths, int64_t rows) const {
  return ReadInts(backend_, lengths.Slice(0, 0, std::min(rows, lengths.rows())));
}

void KvRangeLog::Write(const OpCall& call, char pool, const TensorView& pages,
                       const std::vector<int64_t>& slots) {
  std::vector<bool>& written = written_[pages.data];
  written.resize(NumSlots(pages));
  for (size_t row = 0; row < slots.size(); ++row) {
    if (slots[row] >= 0 && slots[row] < NumSlots(pages)) {
      written[slots[row]] = true;
    } else {
      Violation(call, absl::StrCat("writes ", std::string(1, pool), ": row ", row, ", slot ",
                                   slots[row], " is outside the pool of ", NumSlots(pages)));
    }
  }
  Add(call, true, pool, pages, slots);
}

void KvRangeLog::Read(const OpCall& call, char pool, const TensorView& pages,
                      const std::vector<int32_t>& of_row, const StepSequences& sequences) {
  const auto rows = static_cast<int64_t>(of_row.size());
  const std::vector<int32_t> sequence_of =
      ReadInts(backend_, sequences.row_sequence.Slice(0, 0, rows));
  const std::vector<int32_t> table = ReadInts(backend_, sequences.block_table);
  const int64_t max_pages = sequences.block_table.cols();
  const std::string reads = absl::StrCat("reads ", std::string(1, pool), ": ");

  std::map<int64_t, int64_t> longest;  // by sequence: what its rows read together
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t s = sequence_of[row];
    if (s < 0 || s >= sequences.block_table.rows()) {
      Violation(call, absl::StrCat(reads, "row ", row, " is of sequence ", s, " of ",
                                   sequences.block_table.rows()));
    } else if (of_row[row] < 0 || of_row[row] > max_pages * kPageTokens) {
      Violation(call, absl::StrCat(reads, "row ", row, " has length ", of_row[row],
                                   ", its block table ends at ", max_pages * kPageTokens));
    } else {
      longest[s] = std::max<int64_t>(longest[s], of_row[row]);
    }
  }

  std::vector<bool>& written = written_[pages.data];
  written.resize(NumSlots(pages));
  std::vector<int64_t> slots;
  for (const auto& [s, length] : longest) {
    bool reported = false;  // one line a sequence says enough
    for (int64_t p = 0; p < length; ++p) {
      const int64_t page = table[s * max_pages + p / kPageTokens];
      const int64_t slot = page * kPageTokens + p % kPageTokens;
      slots.push_back(slot);
      const bool inside = page >= 0 && page < pages.dim(0);
      if (reported || (inside && written[slot])) continue;
      reported = true;
      Violation(call, absl::StrCat(reads, "sequence ", s, ", position ", p, ", page ", page,
                                   inside ? " was never written" : " is outside the pool of ",
                                   inside ? "" : absl::StrCat(pages.dim(0), " pages")));
    }
  }
  Add(call, false, pool, pages, slots);
}

void KvRangeLog::Add(const OpCall& call, bool writes, char pool, const TensorView& pages,
                     const std::vector<int64_t>& slots) {
  if (slots.empty()) return;
  const std::vector<Run> runs = RunsOf(pages, slots);
  KvAccess access{.layer = call.layer,
                  .tag = call.tag,
                  .writes = writes,
                  .pool = pool,
                  .begin = runs.front().first,
                  .end = runs.back().second,
                  .bytes = 0,
                  .num_runs = static_cast<int64_t>(runs.size())};
  for (const Run& run : runs) access.bytes += run.second - run.first;
  accesses_.push_back(std::move(access));
}

void KvRangeLog::Violation(const OpCall& call, const std::string& what) {
  violations_.push_back(absl::StrCat(Where(call), " ", what));
}

}  // namespace qwend
