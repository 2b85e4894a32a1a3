// The bounds of one rendering, and the only way to make values that grow.
//
// A template comes from a model folder and its input from a caller; neither may make a rendering
// run, or hold memory, without end. Every failure is INVALID_ARGUMENT.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/tokenizer/jinja/cat.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

inline constexpr int64_t kMaxSteps = 10'000'000;        // nodes evaluated and elements touched
inline constexpr int64_t kMaxBytesMade = 512LL << 20;   // of all strings and containers together
inline constexpr int64_t kMaxOutputBytes = 16LL << 20;  // of the text, and of any one string
inline constexpr int kMaxDepth = 600;                   // nested evaluations, macro calls included
inline constexpr int kMaxValueDepth = 200;              // lists in lists, and the like
inline constexpr int64_t kMaxRange = 100'000;           // elements of range(), as Jinja's sandbox

template <typename... Parts>
absl::Status Error(const Parts&... parts) {
  return absl::InvalidArgumentError(Cat(parts...));
}

class Context {
 public:
  explicit Context(absl::Time now) : now_(now) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  absl::Status Spend(int64_t steps);
  // For work that is linear in bytes.
  absl::Status SpendBytes(size_t bytes) { return Spend(1 + static_cast<int64_t>(bytes / 64)); }
  absl::Status Allocate(int64_t bytes);

  absl::StatusOr<Value> NewText(std::string text, bool markup = false);
  absl::StatusOr<Value> NewSequence(std::vector<Value> items,
                                    Sequence::Kind kind = Sequence::Kind::kList);
  absl::StatusOr<Value> NewDict(Dict dict);
  absl::StatusOr<Namespace*> NewNamespace();

  // A status that carries the template's own words and gets no line number.
  absl::Status Raise(std::string_view message);

  // Lines of the source are noted by the innermost construct that fails; 0 until then.
  void NoteErrorLine(int line) {
    if (error_line_ == 0) error_line_ = line;
  }
  // The error as a caller sees it.
  absl::Status Located(const absl::Status& error) const;

  absl::Time now() const { return now_; }

  // Counts nested evaluations while it lives.
  class Level {
   public:
    explicit Level(Context& context) : context_(context) { ++context_.depth_; }
    ~Level() { --context_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    absl::Status Check() const;

   private:
    Context& context_;
  };

 private:
  absl::Time now_;
  int64_t steps_ = 0;
  int64_t bytes_ = 0;
  int depth_ = 0;
  int error_line_ = 0;
  bool raised_ = false;
  std::deque<Namespace> namespaces_;
};

// The error of a string that outgrows kMaxOutputBytes.
absl::Status TooLong();
// INVALID_ARGUMENT "'x' is undefined" and the like when the value is undefined.
absl::Status RequireDefined(const Value& value);
// INVALID_ARGUMENT unless the value may be a dict's key: a scalar, or a tuple of scalars.
absl::Status RequireHashable(const Value& key);

}  // namespace qwend::jinja
