#include "kernels/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/machine.h"

namespace qwend::cpu {
namespace {

TEST(ThreadPool, RefusesZeroThreads) { EXPECT_THROW(ThreadPool(0), std::invalid_argument); }

TEST(ThreadPool, CoversEveryItemOnce) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (const int64_t items : {0, 1, 2, 3, 16, 17, 63, 1000, 4099}) {
      for (const int64_t grain : {1, 2, 5, 64, 5000}) {
        std::vector<int> seen(items);
        pool.ParallelFor(items, grain, [&](int64_t begin, int64_t end, int worker) {
          ASSERT_LT(begin, end);
          ASSERT_GE(worker, 0);
          ASSERT_LT(worker, threads);
          // Unsynchronised on purpose: pieces are disjoint and the loop's end publishes them.
          for (int64_t i = begin; i < end; ++i) ++seen[i];
        });
        for (int64_t i = 0; i < items; ++i) ASSERT_EQ(seen[i], 1) << i << " of " << items;
      }
    }
  }
}

TEST(ThreadPool, PiecesHaveAtLeastGrainItems) {
  ThreadPool pool(3);
  std::mutex mutex;
  std::vector<std::pair<int64_t, int64_t>> pieces;
  pool.ParallelFor(1000, 48, [&](int64_t begin, int64_t end, int) {
    std::lock_guard lock(mutex);
    pieces.emplace_back(begin, end);
  });
  for (const auto& [begin, end] : pieces) {
    if (end != 1000) {
      EXPECT_GE(end - begin, 48);
    }
  }
}

// Many short loops, as in a decode step: what one loop writes the next one reads.
TEST(ThreadPool, ManyDependentLoops) {
  for (const int threads : {2, 5}) {
    ThreadPool pool(threads);
    std::vector<int64_t> values(64, 0);
    for (int round = 0; round < 3000; ++round) {
      pool.ParallelFor(64, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) values[i] += round;
      });
    }
    for (const int64_t v : values) EXPECT_EQ(v, 3000 * 2999 / 2);
  }
}

// Waits, not for ever, until `done` holds; returns whether it does.
template <typename Done>
bool WaitFor(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return done();
}

// Two items of which each ends only when the other has begun: they need two threads.
void RunTogether(ThreadPool& pool) {
  std::atomic<int> begun{0};
  std::atomic<bool> met{true};
  pool.ParallelFor(2, 1, [&](int64_t, int64_t, int) {
    ++begun;
    if (!WaitFor([&] { return begun == 2; })) met = false;
  });
  EXPECT_TRUE(met);
}

TEST(ThreadPool, WorkersTakePart) {
  ThreadPool pool(2);
  for (int round = 0; round < 50; ++round) RunTogether(pool);
}

TEST(ThreadPool, ParkedWorkersWakeForWork) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    RunTogether(pool);
  }
}

// One item lasts until most of the others are done: whoever is free must take over the range that
// its owner began with.
TEST(ThreadPool, IdleWorkersTakeOverARange) {
  ThreadPool pool(2);
  std::atomic<int> by_others{0};
  std::atomic<int> slow_worker{-1};
  pool.ParallelFor(32, 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) {
      if (i == 0) {
        slow_worker = worker;
        EXPECT_TRUE(WaitFor([&] { return by_others >= 12; }));
      } else if (i < 16 && worker != slow_worker) {
        ++by_others;
      }
    }
  });
}

TEST(ThreadPool, RethrowsAfterTheOthersHaveFinished) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 20; ++round) {
      std::atomic<int> ran{0};
      try {
        pool.ParallelFor(100, 1, [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i) {
            if (i == 0) throw std::runtime_error("item 0");
          }
          ran += static_cast<int>(end - begin);
        });
        FAIL() << "nothing was thrown";
      } catch (const std::runtime_error& e) {
        EXPECT_EQ(e.what(), std::string("item 0"));
      }
      const int after_throw = ran;
      if (threads > 1) {
        EXPECT_GT(after_throw, 0);
      }
      std::this_thread::yield();
      EXPECT_EQ(ran, after_throw);
      pool.ParallelFor(
          8, 1, [&](int64_t begin, int64_t end, int) { ran += static_cast<int>(end - begin); });
      EXPECT_EQ(ran, after_throw + 8);
    }
  }
}

TEST(ThreadPool, SumsAgreeWhoeverRunsThem) {
  ThreadPool pool(4);
  std::vector<double> values(10000);
  std::iota(values.begin(), values.end(), 1.0);
  for (int round = 0; round < 50; ++round) {
    std::vector<double> partial(values.size() / 100);
    pool.ParallelFor(static_cast<int64_t>(partial.size()), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t p = begin; p < end; ++p) {
        for (int64_t i = 0; i < 100; ++i) partial[p] += values[p * 100 + i];
      }
    });
    EXPECT_EQ(std::accumulate(partial.begin(), partial.end(), 0.0), 50005000.0);
  }
}

double ProcessorSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Workers that may spin, and more than there are processors, which may not.
TEST(ThreadPool, IdleWorkersPark) {
  for (const int threads : {UsableProcessors(), 4 * UsableProcessors()}) {
    ThreadPool pool(threads);
    std::atomic<int> ran{0};
    const auto loop = [&] {
      pool.ParallelFor(
          64, 1, [&](int64_t begin, int64_t end, int) { ran += static_cast<int>(end - begin); });
    };
    loop();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const double before = ProcessorSeconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_LT(ProcessorSeconds() - before, 0.1);
    loop();
    EXPECT_EQ(ran, 128);
  }
}

// Far more threads than processors: loops still end quickly, since they wait only for workers that
// have begun.
TEST(ThreadPool, Oversubscribed) {
  ThreadPool pool(4 * UsableProcessors() + 1);
  std::atomic<int64_t> sum{0};
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < 500; ++round) {
    pool.ParallelFor(256, 1, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
  }
  EXPECT_EQ(sum, 500 * 256);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Machine, ReportsSaneFigures) {
  EXPECT_GE(UsableProcessors(), 1);
  EXPECT_FALSE(ProcessorName().empty());
  const MemoryStatus memory = QueryMemory();
  EXPECT_GT(memory.total, int64_t{64} << 20);
  EXPECT_GT(memory.free, 0);
  EXPECT_LE(memory.free, memory.total);
}

TEST(Machine, RespectsTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &before)) {
      CPU_SET(i, &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(UsableProcessors(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

}  // namespace
}  // namespace qwend::cpu
