// Cuts normalized text into the pieces that byte-pair merges may not cross.
#pragma once

#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/tokenizer/regex.h"
#include "nlohmann/json.hpp"

namespace qwend {

// Immutable after FromJson; usable from any thread.
class PreTokenizer {
 public:
  using Sink = absl::FunctionRef<absl::Status(std::string_view)>;

  // `config` is tokenizer.json's "pre_tokenizer": ByteLevel, or a Sequence of Split (behaviour
  // Isolated) and Digits that ends in ByteLevel. INVALID_ARGUMENT names any other type or option;
  // `where` begins the message.
  static absl::StatusOr<PreTokenizer> FromJson(const nlohmann::json& config,
                                               absl::string_view where);

  // Calls `piece` for every non-empty piece of `text`, in order. A piece is raw UTF-8 bytes, not
  // yet in the byte alphabet, and lives only as long as the call.
  absl::Status Split(std::string_view text, Sink piece) const;

 private:
  absl::Status AddStep(const nlohmann::json& config, absl::string_view where);
  absl::Status AddByteLevel(const nlohmann::json& config, absl::string_view where);
  absl::Status SplitFrom(size_t step, std::string_view text, Sink piece) const;

  // Each splits what the one before it left. The last is ByteLevel's own when it has one.
  std::vector<Regex> splits_;
  bool has_byte_level_ = false;
  bool add_prefix_space_ = false;  // ByteLevel puts a space before a piece that begins without one
  size_t prefix_before_ = 0;       // it does so before the split of this index
};

}  // namespace qwend
