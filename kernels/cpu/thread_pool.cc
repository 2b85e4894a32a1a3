#include "kernels/cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "kernels/cpu/machine.h"
#include "kernels/tensor.h"

namespace qwend::cpu {
namespace {

// The state word: [epoch of the loop : 32][open : 1][workers inside : 31]. Workers enter a loop by
// adding 1 while it is open; the caller closes it when no piece is left and waits for 0 inside.
constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kInside = kOpen - 1;
constexpr uint32_t EpochOf(uint64_t state) { return static_cast<uint32_t>(state >> 32); }

// Blocks [begin, end) that a worker has yet to run.
constexpr uint64_t PackRange(uint64_t begin, uint64_t end) { return begin << 32 | end; }
constexpr uint64_t BeginOf(uint64_t range) { return range >> 32; }
constexpr uint64_t EndOf(uint64_t range) { return range & 0xffffffffu; }

// What a worker takes from its own range at once: an eighth of it, so that pieces are long at first
// and one block at the end.
constexpr uint64_t kPieceShare = 8;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesBetweenClockReads = 64;

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until done() or until `limit` has passed; returns the last done().
template <typename Done>
bool SpinUntil(std::chrono::nanoseconds limit, const Done& done) {
  if (done()) return true;
  if (limit.count() == 0) return false;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPausesBetweenClockReads; ++i) {
      Pause();
      if (done()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace

struct ThreadPool::Shared {
  struct alignas(64) Slot {
    std::atomic<uint64_t> range{0};
  };

  explicit Shared(int threads) : slots(threads) {}

  // Pieces from this worker's range, then from others', until none is left.
  void Work(int worker);
  bool Steal(int worker);
  void RunBlocks(uint64_t begin, uint64_t end, int worker);

  alignas(64) std::atomic<uint64_t> state{0};
  alignas(64) std::atomic<int> parked_workers{0};
  std::atomic<bool> caller_parked{false};
  std::atomic<bool> stop{false};

  // The loop in progress: written before it opens, read by workers inside it.
  int64_t items = 0;
  int64_t grain = 1;
  Piece piece = nullptr;
  void* body = nullptr;
  std::vector<Slot> slots;

  std::mutex error_mutex;
  std::exception_ptr error;  // the first one of this loop

  std::mutex park_mutex;
  std::condition_variable work_arrived;
  std::condition_variable workers_left;
  std::chrono::nanoseconds spin{0};
};

void ThreadPool::Shared::RunBlocks(uint64_t begin, uint64_t end, int worker) {
  try {
    piece(body, static_cast<int64_t>(begin) * grain,
          std::min(items, static_cast<int64_t>(end) * grain), worker);
  } catch (...) {
    std::lock_guard lock(error_mutex);
    if (!error) error = std::current_exception();
  }
}

bool ThreadPool::Shared::Steal(int worker) {
  const int n = static_cast<int>(slots.size());
  for (int i = 1; i < n; ++i) {
    std::atomic<uint64_t>& victim = slots[(worker + i) % n].range;
    uint64_t range = victim.load(std::memory_order_relaxed);
    while (BeginOf(range) < EndOf(range)) {
      const uint64_t take = (EndOf(range) - BeginOf(range) + 1) / 2;
      const uint64_t split = EndOf(range) - take;
      if (victim.compare_exchange_weak(range, PackRange(BeginOf(range), split),
                                       std::memory_order_relaxed)) {
        slots[worker].range.store(PackRange(split, split + take), std::memory_order_relaxed);
        return true;
      }
    }
  }
  return false;
}

void ThreadPool::Shared::Work(int worker) {
  std::atomic<uint64_t>& own = slots[worker].range;
  do {
    uint64_t range = own.load(std::memory_order_relaxed);
    while (BeginOf(range) < EndOf(range)) {
      const uint64_t left = EndOf(range) - BeginOf(range);
      const uint64_t next = BeginOf(range) + std::max<uint64_t>(1, left / kPieceShare);
      if (own.compare_exchange_weak(range, PackRange(next, EndOf(range)),
                                    std::memory_order_relaxed)) {
        RunBlocks(BeginOf(range), next, worker);
        range = own.load(std::memory_order_relaxed);
      }
    }
  } while (Steal(worker));
}

void ThreadPool::WorkerMain(int worker) {
  Shared& s = *shared_;
  uint32_t last_epoch = 0;
  uint64_t state = 0;
  const auto work_waits = [&](std::memory_order order) {
    state = s.state.load(order);
    return ((state & kOpen) != 0 && EpochOf(state) != last_epoch) ||
           s.stop.load(std::memory_order_relaxed);
  };
  for (;;) {
    if (!SpinUntil(s.spin, [&] { return work_waits(std::memory_order_acquire); })) {
      std::unique_lock lock(s.park_mutex);
      // Sequentially consistent with RunLoop: either it sees this worker parked, or this worker
      // sees its loop.
      s.parked_workers.fetch_add(1, std::memory_order_seq_cst);
      s.work_arrived.wait(lock, [&] { return work_waits(std::memory_order_seq_cst); });
      s.parked_workers.fetch_sub(1, std::memory_order_relaxed);
    }
    if (s.stop.load(std::memory_order_relaxed)) return;
    if (!s.state.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) continue;
    last_epoch = EpochOf(state);
    s.Work(worker);
    const uint64_t left = s.state.fetch_sub(1, std::memory_order_seq_cst) - 1;
    if ((left & (kOpen | kInside)) == 0 && s.caller_parked.load(std::memory_order_seq_cst)) {
      std::lock_guard lock(s.park_mutex);
      s.workers_left.notify_one();
    }
  }
}

void ThreadPool::RunLoop(int64_t items, int64_t grain, Piece piece, void* body) {
  Shared& s = *shared_;
  // Block numbers must fit into half a word.
  s.grain = std::max<int64_t>({grain, 1, (items >> 31) + 1});
  s.items = items;
  s.piece = piece;
  s.body = body;
  const int64_t blocks = (items + s.grain - 1) / s.grain;
  for (int i = 0; i < threads_; ++i) {
    s.slots[i].range.store(PackRange(blocks * i / threads_, blocks * (i + 1) / threads_),
                           std::memory_order_relaxed);
  }
  const uint64_t epoch = EpochOf(s.state.load(std::memory_order_relaxed)) + 1;
  s.state.store(epoch << 32 | kOpen, std::memory_order_seq_cst);
  if (s.parked_workers.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard lock(s.park_mutex);
    s.work_arrived.notify_all();
  }
  s.Work(0);
  s.state.fetch_and(~kOpen, std::memory_order_acq_rel);
  const auto all_left = [&](std::memory_order order) {
    return (s.state.load(order) & kInside) == 0;
  };
  if (!SpinUntil(s.spin, [&] { return all_left(std::memory_order_acquire); })) {
    std::unique_lock lock(s.park_mutex);
    s.caller_parked.store(true, std::memory_order_seq_cst);
    s.workers_left.wait(lock, [&] { return all_left(std::memory_order_seq_cst); });
    s.caller_parked.store(false, std::memory_order_relaxed);
  }
  if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));
}

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  Require(threads >= 1, "ThreadPool: ", threads, " threads; at least 1 is needed");
  shared_ = std::make_unique<Shared>(threads);
  // With fewer processors than threads a spinning thread would keep a working one from running.
  if (threads <= UsableProcessors()) shared_->spin = kSpin;
  workers_.reserve(threads - 1);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { WorkerMain(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(shared_->park_mutex);
    shared_->stop.store(true, std::memory_order_seq_cst);
  }
  shared_->work_arrived.notify_all();
  for (std::thread& t : workers_) t.join();
}

}  // namespace qwend::cpu
