// Ctrl-C: cancels the running answer, or ends the program when none is running.
#pragma once

#include <functional>

namespace qwend::client {

// Call once, at the top of main, before any thread exists: SIGINT then reaches only the thread that
// this starts, and a closed pipe is an error of the write instead of a signal.
void InstallSignals();

// While it lives, the first Ctrl-C calls `cancel` (from another thread); the next one ends the
// program with exit code 130, as one does when no scope lives.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> cancel);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  bool interrupted() const;
};

}  // namespace qwend::client
