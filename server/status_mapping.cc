#include "server/status_mapping.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"

namespace qwend {
namespace {

constexpr char kTypePrefix[] = "type.googleapis.com/";
constexpr char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr absl::Duration kQueueFullRetry = absl::Seconds(1);
constexpr absl::Duration kDrainingRetry = absl::Seconds(2);
constexpr absl::Duration kLoadingRetry = absl::Seconds(1);

std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryInfoUrl);
  google::rpc::RetryInfo info;
  if (!payload || !info.ParseFromString(std::string(*payload))) return std::nullopt;
  return absl::Seconds(info.retry_delay().seconds()) +
         absl::Nanoseconds(info.retry_delay().nanos());
}

}  // namespace

void AttachDetail(const google::protobuf::Message& detail, absl::Status* status) {
  status->SetPayload(absl::StrCat(kTypePrefix, detail.GetDescriptor()->full_name()),
                     absl::Cord(detail.SerializeAsString()));
}

absl::Status WithRetry(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(absl::ToInt64Seconds(delay));
  info.mutable_retry_delay()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(delay % absl::Seconds(1))));
  AttachDetail(info, &status);
  return status;
}

absl::Status LoadingError() {
  return WithRetry(absl::UnavailableError("the model is still loading; try again shortly"),
                   kLoadingRetry);
}

absl::Status DrainingError() {
  return WithRetry(absl::UnavailableError("the server is shutting down; ask another one"),
                   kDrainingRetry);
}

absl::Status FailedError() {
  return absl::UnavailableError("the device has failed and the server is ending");
}

absl::Status SlowReaderError(int buffered_tokens) {
  return absl::ResourceExhaustedError(
      absl::StrCat("the stream was ended because its reader is more than ", buffered_tokens,
                   " tokens behind; read faster, or raise --max_buffered_tokens"));
}

absl::Status InternalError(absl::string_view what) {
  return absl::InternalError(absl::StrCat("internal error: ", what));
}

absl::Status RefusedBySubmit(absl::Status status) {
  if (absl::IsResourceExhausted(status)) return WithRetry(std::move(status), kQueueFullRetry);
  return status;
}

absl::Status StatusOf(CloseReason reason) {
  switch (reason) {
    case CloseReason::kEos:
    case CloseReason::kStopToken:
    case CloseReason::kLength:
    case CloseReason::kStopped:
    case CloseReason::kAborted:
      return absl::OkStatus();
    case CloseReason::kCancelled:
      return absl::CancelledError("the caller cancelled the request");
    case CloseReason::kDeadline:
      return absl::DeadlineExceededError("the request's deadline has passed");
    case CloseReason::kNonFiniteLogits:
      return absl::InternalError(
          "the model gave a NaN or infinite logit for this request; nothing was sampled from it");
    case CloseReason::kDeviceFault:
      return absl::InternalError("the device has failed");
  }
  return absl::InternalError("unknown close reason");
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // The codes of absl and gRPC are the same numbers.
  const auto code = static_cast<grpc::StatusCode>(status.code());
  google::rpc::Status details;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    auto* any = details.add_details();
    any->set_type_url(std::string(url));
    any->set_value(std::string(payload));
  });
  const std::string message(status.message());
  if (details.details().empty()) return grpc::Status(code, message);
  details.set_code(static_cast<int>(code));
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

grpc::Status Refuse(const absl::Status& status, grpc::ServerContextBase* context) {
  if (absl::IsResourceExhausted(status)) {
    if (const auto delay = RetryDelay(status)) {
      context->AddTrailingMetadata("grpc-retry-pushback-ms",
                                   absl::StrCat(absl::ToInt64Milliseconds(*delay)));
    }
  }
  return ToGrpc(status);
}

}  // namespace qwend
