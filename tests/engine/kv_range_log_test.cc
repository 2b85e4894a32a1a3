// The KV range log over operators with hand-made slots, tables and lengths; diff_run_test.cc has it
// over real steps.
#include "engine/kv_range_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace qwend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// Operators of a pool of two pages and two heads, which do not run: only their tensors are read.
class KvPoolTest : public testing::Test {
 protected:
  static constexpr int64_t kPages = 2;
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kDim = 4;

  TensorView Ints(std::vector<int32_t> values, std::initializer_list<int64_t> shape) {
    kept_.push_back(std::move(values));
    return TensorView::Of(kept_.back().data(), DType::kI32, shape);
  }
  void Write(std::vector<int32_t> slots) {
    const auto rows = static_cast<int64_t>(slots.size());
    log_.Observe({.op = ops::KvCacheUpdate{.k = {},
                                           .v = {},
                                           .k_pages = k_,
                                           .v_pages = v_,
                                           .slots = Ints(std::move(slots), {rows})},
                  .tag = "kv_cache_update",
                  .layer = 5},
                 rows);
  }
  // One row of sequence `sequence` that sees `length` positions in these two pages.
  void Attend(int32_t sequence, int32_t length, std::vector<int32_t> table) {
    const StepSequences sequences{.query_start = {},
                                  .row_sequence = Ints({sequence}, {1}),
                                  .positions = {},
                                  .block_table = Ints(std::move(table), {1, 2}),
                                  .state_slot = {}};
    log_.Observe({.op = ops::Attention{.out = {},
                                       .q = {},
                                       .k_pages = k_,
                                       .v_pages = v_,
                                       .lengths = Ints({length}, {1}),
                                       .sequences = sequences},
                  .tag = "attention",
                  .layer = 5},
                 1);
  }

  std::unique_ptr<Backend> backend_ = MakeCpuBackend(1);
  std::vector<uint16_t> k_memory_ = std::vector<uint16_t>(kPages * kHeads * 64 * kDim);
  std::vector<uint16_t> v_memory_ = k_memory_;
  TensorView k_ = TensorView::Of(k_memory_.data(), DType::kBF16, {kPages, kHeads, 64, kDim});
  TensorView v_ = TensorView::Of(v_memory_.data(), DType::kBF16, {kPages, kHeads, 64, kDim});
  std::vector<std::vector<int32_t>> kept_;
  KvRangeLog log_{*backend_};
};

TEST_F(KvPoolTest, EachHeadHasItsRun) {
  Write({65, 66});  // page 1, offsets 1 and 2; 8 bytes each, 512 a head, 1024 a page
  ASSERT_THAT(log_.accesses(), SizeIs(2));
  EXPECT_EQ(log_.accesses()[0].ToString(),
            "layer 5 kv_cache_update writes k [1032, 1560), 32 bytes in 2 runs");
  EXPECT_THAT(log_.violations(), IsEmpty());
}

TEST_F(KvPoolTest, WritesOutsideThePoolAreReported) {
  Write({0, 128});
  EXPECT_THAT(
      log_.violations(),
      ElementsAre("layer 5 kv_cache_update writes k: row 1, slot 128 is outside the pool of 128",
                  "layer 5 kv_cache_update writes v: row 1, slot 128 is outside the pool of 128"));
  EXPECT_GT(log_.accesses()[0].end, k_.bytes());
  Write({-1});
  ASSERT_THAT(log_.violations(), SizeIs(4));
  EXPECT_THAT(log_.violations()[2], HasSubstr("row 0, slot -1 is outside"));
}

TEST_F(KvPoolTest, ReadsOutsideThePoolAndTheTablesAreReported) {
  Write({0, 1});
  Attend(0, 2, {0, 0});
  EXPECT_THAT(log_.violations(), IsEmpty());
  Attend(0, 3, {0, 0});
  ASSERT_THAT(log_.violations(), SizeIs(2));
  EXPECT_EQ(log_.violations()[1],
            "layer 5 attention reads v: sequence 0, position 2, page 0 was never written");
  Attend(0, 1, {2, 0});
  ASSERT_THAT(log_.violations(), SizeIs(4));
  EXPECT_EQ(log_.violations()[2],
            "layer 5 attention reads k: sequence 0, position 0, page 2 is outside the pool of 2 "
            "pages");
  Attend(0, 129, {0, 1});
  ASSERT_THAT(log_.violations(), SizeIs(6));
  EXPECT_THAT(log_.violations()[4], HasSubstr("length 129, its block table ends at 128"));
  Attend(1, 1, {0, 1});
  ASSERT_THAT(log_.violations(), SizeIs(8));
  EXPECT_THAT(log_.ToString(), HasSubstr("VIOLATION: layer 5 attention reads k: row 0 is of "
                                         "sequence 1 of 1"));
}

}  // namespace
}  // namespace qwend
