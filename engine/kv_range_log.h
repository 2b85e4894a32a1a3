// Which bytes of the key and value pages each operator touches, computed from the slots, block
// tables and lengths that lie in device memory: the ones the kernels read, not the ones the host
// meant to send. Two rules are checked: no range leaves its page pool, and nothing is read that no
// operator wrote before.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/ops.h"

namespace qwend {

// One operator's touch of one layer's keys or values. Offsets count from the start of that layer's
// pool.
struct KvAccess {
  int layer = -1;
  std::string tag;
  bool writes = false;
  char pool = 'k';       // 'k' or 'v'
  int64_t begin = 0;     // the first byte touched
  int64_t end = 0;       // one past the last
  int64_t bytes = 0;     // touched in [begin, end)
  int64_t num_runs = 0;  // contiguous pieces that they form
  std::string ToString() const;
};

// Thread: the one that runs the backend.
class KvRangeLog {
 public:
  explicit KvRangeLog(Backend& backend) : backend_(backend) {}

  // Notes the operator, if it touches pages. To be called after it ran, for every operator since
  // the pages were fresh. Only the first `rows` rows of the step count: what follows is padding.
  void Observe(const OpCall& call, int64_t rows);

  const std::vector<KvAccess>& accesses() const { return accesses_; }
  // One line each, with layer and tag; empty when both rules held.
  const std::vector<std::string>& violations() const { return violations_; }
  std::string ToString() const;  // one line per access, then the violations

 private:
  void Write(const OpCall& call, char pool, const TensorView& pages,
             const std::vector<int64_t>& slots);
  // `of_row`: how many positions each row sees.
  void Read(const OpCall& call, char pool, const TensorView& pages,
            const std::vector<int32_t>& of_row, const StepSequences& sequences);
  void ObserveFused(const OpCall& call, const ops::DecodeAttention& op, int64_t rows);
  std::vector<int32_t> Lengths(const TensorView& lengths, int64_t rows) const;
  void Add(const OpCall& call, bool writes, char pool, const TensorView& pages,
           const std::vector<int64_t>& slots);
  void Violation(const OpCall& call, const std::string& what);

  Backend& backend_;
  std::map<const void*, std::vector<bool>> written_;  // by pool; one bit per slot
  std::vector<KvAccess> accesses_;
  std::vector<std::string> violations_;
};

}  // namespace qwend
