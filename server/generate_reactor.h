// The gRPC side of a generation.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "qwend/v1/inference.pb.h"
#include "server/service_context.h"

namespace qwend {

// Start a generation, or refuse it without a message. The reactors own themselves until gRPC is
// done with them.
grpc::ServerWriteReactor<v1::GenerateResponse>* StartGenerate(ServiceContext* context,
                                                              grpc::CallbackServerContext* call,
                                                              const v1::GenerateRequest& request);
grpc::ServerUnaryReactor* StartGenerateUnary(ServiceContext* context,
                                             grpc::CallbackServerContext* call,
                                             const v1::GenerateRequest& request,
                                             v1::GenerateUnaryResponse* response);

}  // namespace qwend
