// The connection to a server, and the context of one call.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/options.h"
#include "grpcpp/grpcpp.h"

namespace qwend::client {

// Connects on first use. INVALID_ARGUMENT names a TLS file that cannot be read.
absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectionOptions& options);

// Sets the call's deadline and token.
void Prepare(const ConnectionOptions& options, grpc::ClientContext* context);

// grpc.health.v1 Check. `serving` is set on OK.
grpc::Status CheckHealth(const ConnectionOptions& options,
                         const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                         std::string* serving);

// MakeChannel, then up to options.wait for SERVING. Prints what went wrong and returns null.
std::shared_ptr<grpc::Channel> Connect(const ConnectionOptions& options);

}  // namespace qwend::client
