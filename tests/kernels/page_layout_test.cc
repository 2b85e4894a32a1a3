// Where a position's elements lie in a page (kernels/cuda/page_layout.h): every element has a
// place, and the same piece of eight neighbouring positions lies in different banks.
#include "kernels/cuda/page_layout.h"

#include <set>

#include "gtest/gtest.h"

namespace qwend::cuda {
namespace {

class PageLayout : public testing::TestWithParam<int> {};

TEST_P(PageLayout, GivesEveryElementAPlaceOfItsOwnAndKeepsPiecesTogether) {
  const int dim = GetParam();
  for (int position = 0; position < 64; ++position) {
    std::set<int> places;
    for (int i = 0; i < dim; ++i) {
      const int place = PageColumn(i, position, dim);
      EXPECT_TRUE(0 <= place && place < dim) << i;
      EXPECT_EQ(place % kPieceElements, i % kPieceElements);
      EXPECT_EQ(PageColumn(place, position, dim), i) << "not its own inverse";
      places.insert(place);
    }
    EXPECT_EQ(places.size(), static_cast<size_t>(dim));
  }
}

TEST(PageBanks, APieceOfEightNeighboursLiesInDifferentOnes) {
  for (const int dim : {64, 128, 192, 256}) {
    for (int first = 0; first < 64; ++first) {
      for (int piece = 0; piece < dim / kPieceElements; ++piece) {
        std::set<int> banks;  // of 32, where a piece of bf16, four wide, begins
        for (int i = 0; i < 8; ++i) {
          const int byte = i * dim * 2 + PieceAt(piece, first + i, dim) * kPieceElements * 2;
          banks.insert(byte / 4 % 32);
        }
        EXPECT_EQ(banks.size(), 8u) << dim << ": piece " << piece << " from position " << first;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadSizes, PageLayout, testing::Values(16, 32, 64, 96, 128, 192, 256));

}  // namespace
}  // namespace qwend::cuda
