#include "client/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/commands.h"

namespace qwend::client {
namespace {

struct State {
  absl::Mutex mutex;
  std::function<void()> cancel ABSL_GUARDED_BY(mutex);  // null: no scope lives
  bool interrupted ABSL_GUARDED_BY(mutex) = false;
};

State& Shared() {
  static State* state = new State;
  return *state;
}

void Watch(sigset_t signals) {
  for (;;) {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    State& state = Shared();
    {
      absl::MutexLock lock(&state.mutex);
      if (state.cancel != nullptr && !state.interrupted) {
        state.interrupted = true;
        state.cancel();  // under the lock, so that what it points at cannot end meanwhile
        continue;
      }
    }
    if (isatty(STDERR_FILENO)) (void)!write(STDERR_FILENO, "\n", 1);
    _exit(kInterrupted);
  }
}

}  // namespace

void InstallSignals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread(Watch, signals).detach();
}

InterruptScope::InterruptScope(std::function<void()> cancel) {
  State& state = Shared();
  absl::MutexLock lock(&state.mutex);
  state.cancel = std::move(cancel);
  state.interrupted = false;
}

InterruptScope::~InterruptScope() {
  State& state = Shared();
  absl::MutexLock lock(&state.mutex);
  state.cancel = nullptr;
}

bool InterruptScope::interrupted() const {
  State& state = Shared();
  absl::MutexLock lock(&state.mutex);
  return state.interrupted;
}

}  // namespace qwend::client
