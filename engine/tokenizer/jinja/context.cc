#include "engine/tokenizer/jinja/context.h"

#include <algorithm>
#include <utility>

#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {

absl::Status Context::Spend(int64_t steps) {
  steps_ += steps;
  if (steps_ <= kMaxSteps) return absl::OkStatus();
  return Error("the template takes more than ", kMaxSteps, " steps for this input");
}

absl::Status Context::Allocate(int64_t bytes) {
  bytes_ += bytes;
  if (bytes_ > kMaxBytesMade) {
    return Error("the template needs more than ", kMaxBytesMade >> 20, " MiB for this input");
  }
  return Spend(1 + bytes / 64);
}

absl::StatusOr<Value> Context::NewText(std::string text, bool markup) {
  if (static_cast<int64_t>(text.size()) > kMaxOutputBytes) {
    return TooLong();
  }
  JINJA_CHECK(Allocate(static_cast<int64_t>(text.size()) + 96));
  return Value(std::move(text), markup);
}

absl::StatusOr<Value> Context::NewSequence(std::vector<Value> items, Sequence::Kind kind) {
  JINJA_CHECK(Allocate(static_cast<int64_t>((items.size() + 2) * sizeof(Value))));
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.Depth());
  if (depth >= kMaxValueDepth) {
    return Error("values are nested more than ", kMaxValueDepth, " levels deep");
  }
  auto sequence = std::make_shared<Sequence>();
  sequence->kind = kind;
  sequence->items = std::move(items);
  sequence->depth = depth + 1;
  return Value(std::shared_ptr<const Sequence>(std::move(sequence)));
}

absl::StatusOr<Value> Context::NewDict(Dict dict) {
  JINJA_CHECK(Allocate(static_cast<int64_t>((dict.entries.size() + 2) * 3 * sizeof(Value))));
  if (dict.depth > kMaxValueDepth) {
    return Error("values are nested more than ", kMaxValueDepth, " levels deep");
  }
  return Value(std::make_shared<const Dict>(std::move(dict)));
}

absl::StatusOr<Namespace*> Context::NewNamespace() {
  JINJA_CHECK(Allocate(static_cast<int64_t>(sizeof(Namespace) + 4 * sizeof(Value))));
  return &namespaces_.emplace_back();
}

absl::Status Context::Raise(std::string_view message) {
  raised_ = true;
  return absl::InvalidArgumentError(Cat(message));
}

absl::Status Context::Located(const absl::Status& error) const {
  if (raised_ || error_line_ == 0) return error;
  return Error("chat template, line ", error_line_, ": ", error.message());
}

absl::Status Context::Level::Check() const {
  if (context_.depth_ <= kMaxDepth) return absl::OkStatus();
  return Error("the template nests evaluations or macro calls more than ", kMaxDepth,
               " levels deep");
}

absl::Status TooLong() {
  return Error("the template makes a string of more than ", kMaxOutputBytes >> 20, " MiB");
}

absl::Status RequireDefined(const Value& value) {
  if (const Undefined* undefined = value.undefined()) return Error(undefined->Message());
  return absl::OkStatus();
}

absl::Status RequireHashable(const Value& key) {
  JINJA_CHECK(RequireDefined(key));
  const Sequence* sequence = key.sequence();
  const bool is_tuple = sequence != nullptr && sequence->kind == Sequence::Kind::kTuple;
  if (key.is_none() || key.is_number() || key.is_string() || (is_tuple && key.Depth() == 1)) {
    return absl::OkStatus();
  }
  if (is_tuple) return Error("a tuple of containers as a key is not covered");
  return Error("unhashable type: '", key.TypeName(), "'");
}

}  // namespace qwend::jinja
