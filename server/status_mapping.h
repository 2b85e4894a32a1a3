// The one place where outcomes inside become what a caller sees: absl::Status and CloseReason to
// grpc::Status, with google.rpc details.
//
// A status's payloads are google.rpc messages under their type URLs; they travel in the trailer
// grpc-status-details-bin.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "engine/request.h"

namespace qwend {

// Adds a google.rpc message to what the caller will get.
void AttachDetail(const google::protobuf::Message& detail, absl::Status* status);

// The same status with google.rpc.RetryInfo.
absl::Status WithRetry(absl::Status status, absl::Duration delay);

// Statuses that have one wording.
absl::Status LoadingError();
absl::Status DrainingError();
absl::Status FailedError();  // after a device fault
absl::Status SlowReaderError(int buffered_tokens);
absl::Status InternalError(absl::string_view what);  // an exception's text

// What Engine::Submit refused, as the caller is told: a full queue says when to try again.
absl::Status RefusedBySubmit(absl::Status status);

// How a stream ends after the engine closed it. OK for the reasons that come with a finish message.
absl::Status StatusOf(CloseReason reason);

grpc::Status ToGrpc(const absl::Status& status);

// The same for a call that is refused: adds grpc-retry-pushback-ms to the trailers of a full queue,
// so that a client's retry policy waits.
grpc::Status Refuse(const absl::Status& status, grpc::ServerContextBase* context);

}  // namespace qwend
