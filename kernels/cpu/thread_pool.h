// A fixed set of threads that run one parallel loop at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace qwend::cpu {

// Workers spin for a short while between loops and then park, so that a decode step's hundreds of
// loops cost no system call, and an idle server no processor time. The caller's thread is worker 0
// and does its share.
//
// Every worker begins with a contiguous range of the items and takes pieces from its front, smaller
// ones towards the end; who runs out takes half of what another has left. A loop waits only for
// workers that have begun a piece: one that the system has not scheduled yet holds nobody up.
//
// Thread: ParallelFor from one thread at a time, never from inside a loop. Which worker runs which
// item never changes a result.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // at least 1, the caller included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  // body(begin, end, worker) over disjoint pieces that cover [0, items); a piece has at least
  // `grain` items but for the last. Returns when all are done. An exception thrown by a piece is
  // rethrown here after the others have finished.
  template <typename Body>
  void ParallelFor(int64_t items, int64_t grain, Body&& body) {
    if (items <= 0) return;
    if (threads_ == 1 || items <= grain) {
      body(int64_t{0}, items, 0);
      return;
    }
    using F = std::remove_reference_t<Body>;
    RunLoop(
        items, grain,
        [](void* f, int64_t begin, int64_t end, int worker) {
          (*static_cast<F*>(f))(begin, end, worker);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Piece = void (*)(void* body, int64_t begin, int64_t end, int worker);
  void RunLoop(int64_t items, int64_t grain, Piece piece, void* body);
  void WorkerMain(int worker);

  struct Shared;  // the loop in progress, and what workers wait on
  const int threads_;
  std::unique_ptr<Shared> shared_;
  std::vector<std::thread> workers_;
};

}  // namespace qwend::cpu
