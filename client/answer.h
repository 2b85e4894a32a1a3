// A generation request from the command line, and its answer on the terminal.
#pragma once

#include <string>

#include "client/options.h"
#include "qwend/v1/inference.grpc.pb.h"

namespace qwend::client {

// Everything of a request but its prompt.
void FillRequest(const GenerationOptions& options, v1::GenerateRequest* request);

struct Answer {
  grpc::Status status;
  std::string text;          // of output 0
  bool interrupted = false;  // by Ctrl-C
  bool closed_pipe = false;  // nobody reads standard output any more
  bool aborted = false;      // by the server or an operator: what came is not all
};

// Streams the answer to standard output, each message as it arrives, then a line about it on
// standard error when that is a terminal. Ctrl-C cancels the call. Errors are left to the caller.
Answer StreamAnswer(v1::Inference::Stub& stub, const Options& options,
                    const v1::GenerateRequest& request);

// The exit code for it, after printing the status of a call that failed. For FAILED_PRECONDITION it
// asks the model what it lacks and says which flag helps.
int Conclude(v1::Inference::Stub& stub, const Options& options, const Answer& answer);

}  // namespace qwend::client
