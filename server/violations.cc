#include "server/violations.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "server/status_mapping.h"

namespace qwend {
namespace {

// Base64 and the status message on top stay below 8 KiB.
constexpr size_t kMaxDetailBytes = 4096;
constexpr size_t kMaxMessageBytes = 700;
constexpr size_t kMaxQuoted = 48;

}  // namespace

absl::Status Violations::ToStatus() const {
  google::rpc::BadRequest details;
  std::string message;
  size_t bytes = 0;
  size_t in_message = 0;
  for (size_t i = 0; i < list_.size(); ++i) {
    const Violation& v = list_[i];
    const std::string text = absl::StrCat(i == 0 ? "" : "; ", v.field, ": ", v.description);
    if (in_message == i && message.size() + text.size() <= kMaxMessageBytes) {
      message += text;
      ++in_message;
    }
    bytes += v.field.size() + v.description.size() + 8;
    const bool fits = bytes <= kMaxDetailBytes;
    auto* entry = details.add_field_violations();
    entry->set_field(v.field);
    entry->set_description(fits ? v.description
                                : absl::StrCat(count_ - i, " more violations are not listed"));
    if (!fits) break;
  }
  if (in_message < count_) {
    absl::StrAppend(&message, in_message == 0 ? "" : "; ", count_ - in_message,
                    " more, see the status details");
  }
  absl::Status status = absl::InvalidArgumentError(message);
  AttachDetail(details, &status);
  return status;
}

std::string Quoted(absl::string_view text) {
  const bool cut = text.size() > kMaxQuoted;
  // Every byte that is not printable ASCII is escaped, so a cut character does no harm.
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kMaxQuoted)), cut ? "...\"" : "\"");
}

}  // namespace qwend
