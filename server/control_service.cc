#include "server/control_service.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/unary.h"
#include "server/version.h"
#include "server/violations.h"

namespace qwend {
namespace {

void DescribeServer(const Engine& engine, absl::Duration uptime, v1::ServerInfo* info) {
  const DeviceDescription& d = engine.device();
  const EngineStats stats = engine.Stats();
  info->set_version(kVersion);
  info->set_backend(d.backend);
  info->set_device_name(d.device_name);
  info->set_decode_plan(d.decode_plan);
  info->set_uptime_seconds(absl::ToDoubleSeconds(uptime));
  info->set_max_sequences(d.max_sequences);
  info->set_running(stats.running);
  info->set_waiting(stats.waiting);
  info->set_kv_pages_total(d.kv_pages_total);
  info->set_kv_pages_used(stats.kv_pages_used);
  info->set_kv_page_tokens(d.kv_page_tokens);
  for (const int bucket : d.batch_buckets) info->add_captured_batch_sizes(bucket);
  info->set_weight_bytes(d.weight_bytes);
  info->set_cache_bytes(d.kv_bytes + d.state_bytes);
  info->set_workspace_bytes(d.activation_bytes + d.workspace_bytes);
}

void DescribeProfile(const StepProfile& profile, double peak_bandwidth, v1::KernelProfile* out) {
  out->set_batch_size(profile.batch);
  out->set_steps(profile.steps);
  out->set_step_seconds(profile.step_seconds);
  for (const StepProfile::Kernel& k : profile.kernels) {
    v1::KernelTiming* timing = out->add_kernels();
    timing->set_kernel(k.kernel);
    timing->set_calls_per_step(static_cast<uint32_t>(std::lround(k.calls_per_step)));
    timing->set_seconds_per_step(k.seconds_per_step);
    timing->set_bytes_per_step(k.bytes_per_step);
    if (profile.step_seconds > 0) timing->set_share(k.seconds_per_step / profile.step_seconds);
    if (k.seconds_per_step <= 0) continue;
    const double achieved = k.bytes_per_step / k.seconds_per_step;
    timing->set_achieved_bytes_per_second(achieved);
    if (peak_bandwidth > 0) timing->set_fraction_of_peak(achieved / peak_bandwidth);
  }
}

// batch_size 0 takes the batch that most steps had.
absl::Status PickProfile(const std::vector<StepProfile>& profiles, uint32_t batch_size,
                         int profile_every, const StepProfile** picked) {
  if (profile_every == 0) {
    return absl::FailedPreconditionError(
        "no step is profiled, because the server runs with --profile_every=0; start it with "
        "--profile_every=64, say");
  }
  *picked = nullptr;
  std::vector<int> batches;
  for (const StepProfile& p : profiles) {
    if (p.steps == 0) continue;
    batches.push_back(p.batch);
    if (batch_size != 0 ? p.batch == static_cast<int>(batch_size)
                        : *picked == nullptr || p.steps > (*picked)->steps) {
      *picked = &p;
    }
  }
  if (*picked != nullptr) return absl::OkStatus();
  if (batches.empty()) {
    return absl::NotFoundError(absl::StrCat("no decode step has been profiled yet; one in ",
                                            profile_every,
                                            " is (--profile_every), so generate some more tokens"));
  }
  return absl::NotFoundError(absl::StrCat(
      "batch_size: no step of a batch of ", batch_size, " has been profiled; there are steps of ",
      absl::StrJoin(batches, ", "), " (--profile_every=", profile_every, ")"));
}

}  // namespace

grpc::ServerUnaryReactor* ControlService::Abort(grpc::CallbackServerContext* call,
                                                const v1::AbortRequest* request,
                                                v1::AbortResponse*) {
  return Answer(context_, call, [&]() -> absl::Status {
    if (request->request_id().empty()) {
      Violations violations;
      violations.Add("request_id", "missing; give the id of a live request");
      return violations.ToStatus();
    }
    const auto engine = context_->state.ForQuestion();
    if (!engine.ok()) return engine.status();
    return context_->live.Abort(request->request_id(), *engine);
  });
}

grpc::ServerUnaryReactor* ControlService::GetServerInfo(grpc::CallbackServerContext* call,
                                                        const v1::GetServerInfoRequest*,
                                                        v1::ServerInfo* response) {
  return Answer(context_, call, [&]() -> absl::Status {
    const auto engine = context_->state.ForQuestion();
    if (!engine.ok()) return engine.status();
    DescribeServer(**engine, absl::Now() - context_->started, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ControlService::GetKernelProfile(
    grpc::CallbackServerContext* call, const v1::GetKernelProfileRequest* request,
    v1::KernelProfile* response) {
  return Answer(context_, call, [&]() -> absl::Status {
    const auto engine = context_->state.ForQuestion();
    if (!engine.ok()) return engine.status();
    const EngineStats stats = (*engine)->Stats();
    const StepProfile* profile = nullptr;
    if (auto s = PickProfile(stats.profiles, request->batch_size(),
                             context_->options.engine.profile_every, &profile);
        !s.ok()) {
      return s;
    }
    DescribeProfile(*profile, (*engine)->device().peak_bandwidth, response);
    return absl::OkStatus();
  });
}

}  // namespace qwend
