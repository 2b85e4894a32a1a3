// The pools: nothing is handed out twice, and everything comes back.
#include "engine/kv_pages.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "engine/state_slots.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace qwend {
namespace {

TEST(KvPages, PagesForRoundsUp) {
  EXPECT_EQ(KvPages::PagesFor(1), 1);
  EXPECT_EQ(KvPages::PagesFor(64), 1);
  EXPECT_EQ(KvPages::PagesFor(65), 2);
  EXPECT_EQ(KvPages::PagesFor(int64_t{1} << 33), 1 << 27);
}

TEST(KvPages, GivesAllPagesOrNone) {
  KvPages pool(3);
  auto two = pool.Reserve(2);
  ASSERT_TRUE(two);
  EXPECT_EQ(pool.used(), 2);
  EXPECT_FALSE(pool.Reserve(2));
  EXPECT_EQ(pool.used(), 2);
  auto one = pool.Reserve(1);
  ASSERT_TRUE(one);
  EXPECT_EQ(pool.free(), 0);
  std::vector<int32_t> all(two->pages().begin(), two->pages().end());
  all.push_back(one->pages()[0]);
  EXPECT_THAT(all, testing::UnorderedElementsAre(0, 1, 2));
}

TEST(KvPages, ALeaseEndsOnce) {
  KvPages pool(4);
  {
    KvPages::Lease outer;
    {
      auto lease = pool.Reserve(3);
      outer = *std::move(lease);
    }
    EXPECT_EQ(pool.used(), 3);
    outer.Release();
    EXPECT_EQ(pool.used(), 0);
    EXPECT_TRUE(outer.pages().empty());
    outer.Release();
  }
  EXPECT_EQ(pool.used(), 0);
  EXPECT_EQ(pool.free(), 4);
}

TEST(KvPages, RefusesAnEmptyPool) {
  EXPECT_THROW(KvPages(0), std::invalid_argument);
  EXPECT_THROW(StateSlots(0), std::invalid_argument);
}

TEST(KvPages, RandomUseNeverSharesAndLosesNothing) {
  std::mt19937 random(20261130);
  KvPages pool(37);
  std::vector<KvPages::Lease> leases;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0) {
      const int count = 1 + static_cast<int>(random() % 9);
      const int free = pool.free();
      auto lease = pool.Reserve(count);
      ASSERT_EQ(lease.has_value(), count <= free);
      if (lease) leases.push_back(*std::move(lease));
    } else if (!leases.empty()) {
      std::swap(leases[random() % leases.size()], leases.back());
      leases.pop_back();
    }
    std::vector<int> owners(pool.total(), 0);
    for (const KvPages::Lease& lease : leases) {
      for (int32_t page : lease.pages()) ++owners.at(page);
    }
    ASSERT_LE(*std::max_element(owners.begin(), owners.end()), 1);
    ASSERT_EQ(std::accumulate(owners.begin(), owners.end(), 0), pool.used());
  }
  leases.clear();
  auto whole = pool.Reserve(pool.total());
  ASSERT_TRUE(whole);
  std::vector<int32_t> pages(whole->pages().begin(), whole->pages().end());
  std::sort(pages.begin(), pages.end());
  for (int i = 0; i < pool.total(); ++i) EXPECT_EQ(pages[i], i);
}

TEST(StateSlots, HandsOutEachOnce) {
  StateSlots pool(2);
  auto a = pool.Reserve();
  auto b = pool.Reserve();
  ASSERT_TRUE(a && b);
  EXPECT_NE(a->slot(), b->slot());
  EXPECT_FALSE(pool.Reserve());
  const int slot = a->slot();
  StateSlots::Lease moved = *std::move(a);
  a.reset();
  EXPECT_EQ(pool.used(), 2);
  moved.Release();
  moved.Release();
  EXPECT_EQ(moved.slot(), -1);
  EXPECT_EQ(pool.used(), 1);
  EXPECT_EQ(pool.Reserve()->slot(), slot);
}

}  // namespace
}  // namespace qwend
