#include "client/format.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/protobuf/util/json_util.h"
#include "google/rpc/error_details.pb.h"

namespace qwend::client {

Palette::Palette(int fd, bool wanted) {
  if (!wanted || !IsTerminal(fd)) return;
  bold = "\033[1m";
  dim = "\033[2m";
  red = "\033[31m";
  green = "\033[32m";
  reset = "\033[0m";
}

bool IsTerminal(int fd) { return isatty(fd) == 1; }

bool Write(std::string_view text) {
  if (text.empty()) return true;
  return fwrite(text.data(), 1, text.size(), stdout) == text.size() && fflush(stdout) == 0;
}

void PrintError(const std::string& message) {
  fprintf(stderr, "qwend-client: %s\n", message.c_str());
}

std::string CodeName(grpc::StatusCode code) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const int i = code;
  if (i < 0 || i > 16) return absl::StrCat("code ", i);
  return kNames[i];
}

void PrintStatus(const grpc::Status& status) {
  PrintError(absl::StrCat(CodeName(status.error_code()), ": ", status.error_message()));
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return;
  for (const google::protobuf::Any& any : details.details()) {
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (any.Is<google::rpc::BadRequest>() && any.UnpackTo(&bad)) {
      for (const auto& violation : bad.field_violations()) {
        fprintf(stderr, "  %s: %s\n", violation.field().c_str(), violation.description().c_str());
      }
    } else if (any.Is<google::rpc::RetryInfo>() && any.UnpackTo(&retry)) {
      fprintf(stderr, "  retry after %.3g s\n",
              retry.retry_delay().seconds() + retry.retry_delay().nanos() * 1e-9);
    }
  }
}

std::string JsonLine(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string line;
  const auto status = google::protobuf::util::MessageToJsonString(message, &line, options);
  if (!status.ok()) line = "{}";
  line.push_back('\n');
  return line;
}

std::string Bytes(double bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  int unit = 0;
  while (bytes >= 999.5 && unit < 4) {
    bytes /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.3g %s", bytes, kUnits[unit]);
}

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      absl::StrAppend(&out, i == 0 ? "" : "  ", i == 0 ? row[i] + pad : pad + row[i]);
    }
    out.push_back('\n');
  }
  return out;
}

}  // namespace qwend::client
