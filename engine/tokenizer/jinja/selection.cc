#include "engine/tokenizer/jinja/selection.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/ascii.h"
#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

// A step of a path: a number when it has digits only.
Value PathStep(std::string_view part) {
  constexpr size_t kMaxDigits = 9;
  const bool digits =
      !part.empty() && part.size() <= kMaxDigits &&
      std::all_of(part.begin(), part.end(), [](unsigned char c) { return absl::ascii_isdigit(c); });
  if (!digits) return Value(std::string(part));
  int value = 0;
  for (const char c : part) value = value * 10 + (c - '0');
  return Value(value);
}

// A merge sort whose comparison may fail.
absl::Status MergeSort(Context& context, std::vector<size_t>& order, const std::vector<Value>& keys,
                       bool reverse) {
  std::vector<size_t> merged(order.size());
  for (size_t width = 1; width < order.size(); width *= 2) {
    for (size_t begin = 0; begin < order.size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, order.size());
      const size_t end = std::min(begin + 2 * width, order.size());
      size_t left = begin;
      size_t right = middle;
      for (size_t out = begin; out < end; ++out) {
        bool take_right = left == middle;
        if (left < middle && right < end) {
          const Value& a = keys[order[reverse ? left : right]];
          const Value& b = keys[order[reverse ? right : left]];
          JINJA_ASSIGN(take_right, Less(context, a, b));
        }
        merged[out] = take_right ? order[right++] : order[left++];
      }
    }
    order.swap(merged);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string_view> SplitPath(std::string_view path, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t at = path.find(separator);
    parts.push_back(path.substr(0, at));
    if (at == std::string_view::npos) return parts;
    path.remove_prefix(at + 1);
  }
}

absl::StatusOr<Value> FollowPath(Context& context, const Value& item, const Value& path,
                                 const Value* otherwise) {
  Value value = item;
  if (path.is_string()) {
    for (const std::string_view part : SplitPath(path.text(), '.')) {
      JINJA_ASSIGN(value, GetItem(context, value, PathStep(part)));
      if (value.is_undefined() && otherwise != nullptr) value = *otherwise;
    }
    return value;
  }
  JINJA_ASSIGN(value, GetItem(context, value, path));
  if (value.is_undefined() && otherwise != nullptr) return *otherwise;
  return value;
}

absl::StatusOr<Value> FoldCase(Context& context, const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is_string()) return value;
  JINJA_CHECK(context.SpendBytes(value.text().size() * 4));
  return context.NewText(Lower(value.text()));
}

absl::Status SortByKeys(Context& context, std::vector<Value>& items, const std::vector<Value>& keys,
                        bool reverse) {
  std::vector<size_t> order(items.size());
  std::iota(order.begin(), order.end(), size_t{0});
  JINJA_CHECK(MergeSort(context, order, keys, reverse));
  std::vector<Value> sorted;
  sorted.reserve(items.size());
  for (const size_t i : order) sorted.push_back(std::move(items[i]));
  items = std::move(sorted);
  return absl::OkStatus();
}

}  // namespace qwend::jinja
