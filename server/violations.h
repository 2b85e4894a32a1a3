// Everything that is wrong with a request, gathered before it is refused.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace qwend {

class Violations {
 public:
  struct Violation {
    std::string field;        // path in the request: "stopping.stop_strings[3]"
    std::string description;  // what is wrong, and what would be right
  };

  void Add(std::string field, std::string description) {
    if (++count_ <= kMaxKept) list_.push_back({std::move(field), std::move(description)});
  }
  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }

  // INVALID_ARGUMENT with a summary as its message and a google.rpc.BadRequest as its payload. What
  // does not fit into a caller's default limit on trailers (8 KiB in all) is counted in a last
  // entry.
  absl::Status ToStatus() const;

 private:
  static constexpr size_t kMaxKept = 256;  // more than trailers can carry
  std::vector<Violation> list_;
  size_t count_ = 0;
};

// What a caller wrote, short and printable, for use in a message.
std::string Quoted(absl::string_view text);

}  // namespace qwend
