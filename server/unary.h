// Answers calls that need no waiting.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "server/service_context.h"
#include "server/status_mapping.h"

namespace qwend {

// Checks the token, runs `fn` (absl::Status()) and finishes the call with what it returned.
template <typename Fn>
grpc::ServerUnaryReactor* Answer(ServiceContext* context, grpc::CallbackServerContext* call,
                                 Fn&& fn) {
  absl::Status status = context->authenticator.Check(*call);
  if (status.ok()) status = Guarded(std::forward<Fn>(fn));
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(Refuse(status, call));
  return reactor;
}

}  // namespace qwend
