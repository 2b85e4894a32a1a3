// qwend-client profile: where the time of a decode step goes, kernel by kernel.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"
#include "qwend/v1/inference.grpc.pb.h"

namespace qwend::client {
namespace {

std::string ProfileTable(const v1::KernelProfile& profile) {
  std::vector<std::vector<std::string>> rows = {
      {"kernel", "calls", "us/step", "share", "bytes/step", "GB/s", "of peak"}};
  double covered = 0;
  for (const v1::KernelTiming& k : profile.kernels()) {
    covered += k.seconds_per_step();
    rows.push_back({k.kernel(), absl::StrCat(k.calls_per_step()),
                    absl::StrFormat("%.1f", k.seconds_per_step() * 1e6),
                    absl::StrFormat("%.1f %%", k.share() * 100), Bytes(k.bytes_per_step()),
                    absl::StrFormat("%.2f", k.achieved_bytes_per_second() / 1e9),
                    absl::StrFormat("%.0f %%", k.fraction_of_peak() * 100)});
  }
  return absl::StrCat(
      absl::StrFormat("batch %u: %u instrumented steps, %.1f us each, %.1f us of them in kernels\n",
                      profile.batch_size(), profile.steps(), profile.step_seconds() * 1e6,
                      covered * 1e6),
      Table(rows));
}

}  // namespace

int Profile(const Options& options) {
  if (!options.arguments.empty()) {
    PrintError("profile takes no argument; --batch N chooses the batch size");
    return kUsage;
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  grpc::ClientContext context;
  Prepare(options.connection, &context);
  v1::GetKernelProfileRequest request;
  request.set_batch_size(options.batch);
  v1::KernelProfile profile;
  const grpc::Status status =
      v1::Control::NewStub(channel)->GetKernelProfile(&context, request, &profile);
  if (!status.ok()) {
    PrintStatus(status);
    return kFailed;
  }
  if (options.json) return Write(JsonLine(profile)) ? kOk : kClosedPipe;
  if (profile.steps() == 0) {
    PrintError(
        "no instrumented step yet: generate some tokens first (the server's --profile_every)");
    return kOk;
  }
  return Write(ProfileTable(profile)) ? kOk : kClosedPipe;
}

}  // namespace qwend::client
