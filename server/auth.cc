#include "server/auth.h"

#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace qwend {
namespace {

// No early exit: what a wrong token has in common with a right one must not show in the time.
bool SameText(absl::string_view expected, absl::string_view given) {
  unsigned char difference = expected.size() == given.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    const char e = expected.empty() ? '\0' : expected[i % expected.size()];
    difference = static_cast<unsigned char>(difference | (e ^ given[i]));
  }
  return difference == 0;
}

}  // namespace

absl::StatusOr<Authenticator> Authenticator::Load(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("--auth_token_file=", path, ": cannot be read; give a file of tokens"));
  }
  std::vector<std::string> tokens;
  for (std::string line; std::getline(file, line);) {
    std::string token(absl::StripAsciiWhitespace(line));
    if (!token.empty() && token[0] != '#') tokens.push_back(std::move(token));
  }
  if (tokens.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--auth_token_file=", path, ": holds no token, so nobody could call; add one a line"));
  }
  return Authenticator(std::move(tokens));
}

absl::Status Authenticator::Check(const grpc::ServerContextBase& context) const {
  if (tokens_.empty()) return absl::OkStatus();
  constexpr absl::string_view kScheme = "bearer ";
  const auto& metadata = context.client_metadata();
  const auto header = metadata.find("authorization");
  if (header == metadata.end() ||
      !absl::StartsWithIgnoreCase(absl::string_view(header->second.data(), header->second.size()),
                                  kScheme)) {
    return absl::UnauthenticatedError("this server wants the header authorization: Bearer TOKEN");
  }
  const absl::string_view given =
      absl::string_view(header->second.data(), header->second.size()).substr(kScheme.size());
  bool known = false;
  for (const std::string& token : tokens_) {
    const bool same = SameText(token, given);
    known = known || same;
  }
  if (known) return absl::OkStatus();
  return absl::PermissionDeniedError("the token is not one that this server accepts");
}

}  // namespace qwend
