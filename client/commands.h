// The subcommands. Each prints its own outcome and returns the process's exit code.
#pragma once

#include "client/options.h"

namespace qwend::client {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,         // a call failed or was aborted, or health is not SERVING
  kUsage = 2,          // a wrong flag or argument; nothing was sent
  kInterrupted = 130,  // Ctrl-C
  kClosedPipe = 141,   // the reader of standard output went away
};

int Generate(const Options& options);
int Chat(const Options& options);
int Tokenize(const Options& options);
int Detokenize(const Options& options);
int Info(const Options& options);
int Health(const Options& options);
int Abort(const Options& options);
int Profile(const Options& options);
int Bench(const Options& options);

}  // namespace qwend::client
