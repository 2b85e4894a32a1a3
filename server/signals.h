// SIGTERM and SIGINT, taken by a thread of their own: nothing runs inside a signal handler.
#pragma once

#include <functional>
#include <thread>

namespace qwend {

// Blocks both in this thread and in every thread that it starts from now on. Call first in main.
void BlockStopSignals();

class SignalThread {
 public:
  // `on_signal` runs once for each signal.
  explicit SignalThread(std::function<void(int signal)> on_signal);
  ~SignalThread();

 private:
  int signal_fd_;
  int end_fd_;
  std::thread thread_;
};

}  // namespace qwend
