// Tells ThreadSanitizer about absl::Mutex and absl::CondVar. The distribution's Abseil is built
// without it, so it would see no order between two holders of a lock and report races that are
// none. Linked with --wrap for each function below (CMakeLists.txt); QWEND_ABSL_SYMBOL is how their
// mangled names begin, with Abseil's inline namespace.
#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#define REAL(function) __asm__("__real_" QWEND_ABSL_SYMBOL function)
#define WRAP(function) __asm__("__wrap_" QWEND_ABSL_SYMBOL function)
#define MUTEX_LOCK "5Mutex4LockEv"
#define MUTEX_UNLOCK "5Mutex6UnlockEv"
#define COND_WAIT_TIMEOUT "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE"

void RealLock(absl::Mutex*) REAL(MUTEX_LOCK);
void RealUnlock(absl::Mutex*) REAL(MUTEX_UNLOCK);
bool RealWaitWithTimeout(absl::CondVar*, absl::Mutex*, absl::Duration) REAL(COND_WAIT_TIMEOUT);
void WrapLock(absl::Mutex*) WRAP(MUTEX_LOCK);
void WrapUnlock(absl::Mutex*) WRAP(MUTEX_UNLOCK);
bool WrapWaitWithTimeout(absl::CondVar*, absl::Mutex*, absl::Duration) WRAP(COND_WAIT_TIMEOUT);

void WrapLock(absl::Mutex* mutex) {
  RealLock(mutex);
  __tsan_acquire(mutex);
}

void WrapUnlock(absl::Mutex* mutex) {
  __tsan_release(mutex);
  RealUnlock(mutex);
}

bool WrapWaitWithTimeout(absl::CondVar* condition, absl::Mutex* mutex, absl::Duration timeout) {
  __tsan_release(mutex);
  const bool expired = RealWaitWithTimeout(condition, mutex, timeout);
  __tsan_acquire(mutex);
  return expired;
}
