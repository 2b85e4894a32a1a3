// Bearer tokens.
#pragma once

#include <grpcpp/server_context.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace qwend {

class Authenticator {
 public:
  Authenticator() = default;  // lets everybody in
  explicit Authenticator(std::vector<std::string> tokens) : tokens_(std::move(tokens)) {}

  // One token a line; blank lines and lines starting with # do not count. NOT_FOUND or
  // INVALID_ARGUMENT name the file.
  static absl::StatusOr<Authenticator> Load(const std::string& path);

  // UNAUTHENTICATED without an "authorization: Bearer ..." header, PERMISSION_DENIED with a token
  // that is not in the file. Takes the same time for every wrong token of a length.
  absl::Status Check(const grpc::ServerContextBase& context) const;

 private:
  std::vector<std::string> tokens_;
};

}  // namespace qwend
