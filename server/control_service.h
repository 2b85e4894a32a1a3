#pragma once

#include "qwend/v1/inference.grpc.pb.h"
#include "server/service_context.h"

namespace qwend {

class ControlService final : public v1::Control::CallbackService {
 public:
  explicit ControlService(ServiceContext* context) : context_(context) {}

  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* call,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const v1::GetServerInfoRequest* request,
                                          v1::ServerInfo* response) override;
  grpc::ServerUnaryReactor* GetKernelProfile(grpc::CallbackServerContext* call,
                                             const v1::GetKernelProfileRequest* request,
                                             v1::KernelProfile* response) override;

 private:
  ServiceContext* const context_;
};

}  // namespace qwend
