#include "engine/tokenizer/jinja/access.h"

#include <algorithm>
#include <array>

#include "engine/tokenizer/jinja/methods.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

std::string OwnerName(const Value& object) {
  if (object.is_none()) return "None";
  if (object.name_space() != nullptr) return "jinja2.utils.Namespace object";
  if (object.loop() != nullptr) return "jinja2.runtime.LoopContext object";
  return Cat(object.TypeName(), " object");
}

Value MissingAttribute(const Value& object, std::string_view name) {
  return Value(Undefined{Undefined::Kind::kAttribute, std::string(name), OwnerName(object)});
}

// Methods that change their object; the sandbox hides them.
bool IsBlocked(const Value& object, std::string_view name) {
  if (name.starts_with('_')) return true;
  static constexpr std::array kOfDicts = {"clear", "pop", "popitem", "setdefault", "update"};
  static constexpr std::array kOfLists = {"append", "clear",  "extend",  "insert",
                                          "pop",    "remove", "reverse", "sort"};
  if (object.dict() != nullptr) {
    return std::find(kOfDicts.begin(), kOfDicts.end(), name) != kOfDicts.end();
  }
  if (object.sequence() != nullptr && object.sequence()->kind == Sequence::Kind::kList) {
    return std::find(kOfLists.begin(), kOfLists.end(), name) != kOfLists.end();
  }
  return false;
}

Value LoopAttribute(const Value& object, std::string_view name) {
  const LoopState& loop = *object.loop();
  const std::vector<Value>& items = loop.items->items;
  const size_t index = loop.index;
  if (name == "index") return Value(index + 1);
  if (name == "index0") return Value(index);
  if (name == "revindex") return Value(items.size() - index);
  if (name == "revindex0") return Value(items.size() - index - 1);
  if (name == "first") return Value(index == 0);
  if (name == "last") return Value(index + 1 == items.size());
  if (name == "length") return Value(items.size());
  if (name == "depth") return Value(1);
  if (name == "depth0") return Value(0);
  if (name == "previtem") {
    if (index > 0) return items[index - 1];
    return Value(Undefined{Undefined::Kind::kHint, "there is no previous item", ""});
  }
  if (name == "nextitem") {
    if (index + 1 < items.size()) return items[index + 1];
    return Value(Undefined{Undefined::Kind::kHint, "there is no next item", ""});
  }
  return BindMethod(object, name).value_or(MissingAttribute(object, name));
}

// A position counted from the end when negative; -1 when there is none.
int64_t Position(Integer index, size_t size) {
  const auto length = static_cast<Integer>(size);
  if (index < 0) index += length;
  return index < 0 || index >= length ? -1 : static_cast<int64_t>(index);
}

absl::StatusOr<Value> CharacterAt(Context& context, const Value& text, Integer index, bool& found) {
  const std::string& utf8 = text.text();
  JINJA_CHECK(context.SpendBytes(utf8.size() * 4));
  const int64_t position = Position(index, CountCodePoints(utf8));
  found = position >= 0;
  if (!found) return Value();
  size_t end = ByteOffset(utf8, static_cast<size_t>(position));
  const size_t begin = end;
  NextCodePoint(utf8, end);
  return context.NewText(utf8.substr(begin, end - begin), text.is_markup());
}

struct Slice {
  int64_t start = 0;
  int64_t stop = 0;
  int64_t step = 1;
  int64_t count = 0;
};

absl::StatusOr<Integer> SliceBound(const Value& value, Integer otherwise) {
  if (value.is_none()) return otherwise;
  if (value.is_int() || value.is_bool()) return value.integer();
  return Error("slice indices must be integers or None or have an __index__ method");
}

// Python's slice.indices().
absl::StatusOr<Slice> ResolveSlice(size_t size, const Value& start_value, const Value& stop_value,
                                   const Value& step_value) {
  const auto length = static_cast<Integer>(size);
  JINJA_ASSIGN(Integer step, SliceBound(step_value, 1));
  if (step == 0) return Error("slice step cannot be zero");
  step = std::clamp<Integer>(step, -length - 1, length + 1);
  const Integer lowest = step < 0 ? -1 : 0;
  const Integer highest = step < 0 ? length - 1 : length;
  const auto clamp = [&](const Value& value, Integer otherwise) -> absl::StatusOr<Integer> {
    JINJA_ASSIGN(Integer bound, SliceBound(value, otherwise));
    if (value.is_none()) return bound;
    if (bound < 0) bound = std::max<Integer>(bound, -length - 1) + length;
    return std::clamp(bound, lowest, highest);
  };
  JINJA_ASSIGN(const Integer start, clamp(start_value, step < 0 ? highest : lowest));
  JINJA_ASSIGN(const Integer stop, clamp(stop_value, step < 0 ? lowest : highest));
  Integer count = 0;
  if (step > 0 && stop > start) count = (stop - start - 1) / step + 1;
  if (step < 0 && start > stop) count = (start - stop - 1) / -step + 1;
  return Slice{static_cast<int64_t>(start), static_cast<int64_t>(stop), static_cast<int64_t>(step),
               static_cast<int64_t>(count)};
}

absl::StatusOr<Value> SliceText(Context& context, const Value& object, const Value& start,
                                const Value& stop, const Value& step) {
  const std::string& text = object.text();
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  const std::vector<std::string_view> characters = Characters(text);
  JINJA_ASSIGN(const Slice slice, ResolveSlice(characters.size(), start, stop, step));
  std::string out;
  for (int64_t i = 0; i < slice.count; ++i) {
    out += characters[static_cast<size_t>(slice.start + i * slice.step)];
  }
  return context.NewText(std::move(out), object.is_markup());
}

}  // namespace

absl::StatusOr<Value> GetAttribute(Context& context, const Value& object, std::string_view name) {
  JINJA_CHECK(context.Spend(1));
  JINJA_CHECK(RequireDefined(object));
  if (IsBlocked(object, name)) {
    return Value(Undefined{Undefined::Kind::kHint,
                           Cat("access to attribute ", ReprText(name), " of '", object.TypeName(),
                               "' object is unsafe."),
                           ""});
  }
  if (object.loop() != nullptr) return LoopAttribute(object, name);
  if (const Namespace* ns = object.name_space()) {
    const Value* value = ns->attributes.Find(name);
    return value != nullptr ? *value : MissingAttribute(object, name);
  }
  if (auto method = BindMethod(object, name); method.has_value()) return *std::move(method);
  if (const Dict* dict = object.dict()) {
    if (const Value* value = dict->Find(name)) return *value;
  }
  return MissingAttribute(object, name);
}

absl::StatusOr<Value> GetItem(Context& context, const Value& object, const Value& key) {
  JINJA_CHECK(context.Spend(1));
  JINJA_CHECK(RequireDefined(object));
  if (const Dict* dict = object.dict()) {
    if (!key.is_string()) JINJA_CHECK(context.Spend(static_cast<int64_t>(dict->entries.size())));
    if (const Value* value = dict->Find(key)) return *value;
  }
  if (key.is_string()) {
    // A dict's missing key may still be the name of a method; a name alone is never an item here.
    JINJA_ASSIGN(Value attribute, GetAttribute(context, object, key.text()));
    return attribute;
  }
  if (key.is_int() || key.is_bool()) {
    const Sequence* sequence = object.sequence();
    if (sequence != nullptr && sequence->indexable()) {
      const int64_t position = Position(key.integer(), sequence->items.size());
      if (position >= 0) return sequence->items[static_cast<size_t>(position)];
    } else if (object.is_string()) {
      bool found = false;
      JINJA_ASSIGN(Value character, CharacterAt(context, object, key.integer(), found));
      if (found) return character;
    }
  }
  JINJA_ASSIGN(std::string printed, Repr(context, key));
  return Value(Undefined{Undefined::Kind::kElement, std::move(printed), OwnerName(object)});
}

absl::StatusOr<Value> GetSlice(Context& context, const Value& object, const Value& start,
                               const Value& stop, const Value& step) {
  JINJA_CHECK(RequireDefined(object));
  if (object.is_string()) return SliceText(context, object, start, stop, step);
  if (object.dict() != nullptr) return Error("unhashable type: 'slice'");
  const Sequence* sequence = object.sequence();
  if (sequence == nullptr || !sequence->indexable()) {
    return Error("'", object.TypeName(), "' object is not subscriptable");
  }
  JINJA_ASSIGN(const Slice slice, ResolveSlice(sequence->items.size(), start, stop, step));
  if (sequence->kind == Sequence::Kind::kRange) {
    const Integer first = sequence->range[0] + slice.start * sequence->range[2];
    const Integer stride = slice.step * sequence->range[2];
    const Integer end = sequence->range[0] + slice.stop * sequence->range[2];
    return NewRange(context, first, end, stride);
  }
  JINJA_CHECK(context.Spend(slice.count));
  std::vector<Value> items;
  items.reserve(static_cast<size_t>(slice.count));
  for (int64_t i = 0; i < slice.count; ++i) {
    items.push_back(sequence->items[static_cast<size_t>(slice.start + i * slice.step)]);
  }
  return context.NewSequence(std::move(items), sequence->kind);
}

absl::StatusOr<std::vector<Value>> Iterate(Context& context, const Value& value) {
  std::vector<Value> items;
  if (value.is_undefined()) return items;
  if (const Sequence* sequence = value.sequence()) {
    JINJA_CHECK(context.Allocate(static_cast<int64_t>(sequence->items.size() * sizeof(Value))));
    if (sequence->kind != Sequence::Kind::kGenerator) return sequence->items;
    if (sequence->consumed) return items;
    sequence->consumed = true;
    return sequence->items;
  }
  if (const Dict* dict = value.dict()) {
    JINJA_CHECK(context.Allocate(static_cast<int64_t>(dict->entries.size() * sizeof(Value))));
    for (const auto& [key, unused] : dict->entries) items.push_back(key);
    return items;
  }
  if (value.is_string()) {
    const std::vector<std::string_view> characters = Characters(value.text());
    JINJA_CHECK(context.Allocate(static_cast<int64_t>(characters.size() * 128)));
    for (const std::string_view character : characters) {
      items.emplace_back(std::string(character), value.is_markup());
    }
    return items;
  }
  return Error("'", value.TypeName(), "' object is not iterable");
}

absl::StatusOr<size_t> Length(Context& context, const Value& value) {
  if (value.is_undefined()) return size_t{0};
  if (value.is_string()) {
    JINJA_CHECK(context.SpendBytes(value.text().size()));
    return CountCodePoints(value.text());
  }
  if (const Dict* dict = value.dict()) return dict->entries.size();
  if (const LoopState* loop = value.loop()) return loop->items->items.size();
  const Sequence* sequence = value.sequence();
  if (sequence != nullptr && sequence->kind != Sequence::Kind::kGenerator) {
    return sequence->items.size();
  }
  return Error("object of type '", value.TypeName(), "' has no len()");
}

absl::StatusOr<Value> NewRange(Context& context, Integer start, Integer stop, Integer step) {
  if (step == 0) return Error("range() arg 3 must not be zero");
  constexpr Integer kBound = Integer{1} << 100;  // far from any overflow of the difference
  if (start > kBound || start < -kBound || stop > kBound || stop < -kBound || step > kBound ||
      step < -kBound) {
    return Error("range() takes smaller numbers");
  }
  Integer count = 0;
  if (step > 0 && stop > start) count = (stop - start - 1) / step + 1;
  if (step < 0 && start > stop) count = (start - stop - 1) / -step + 1;
  if (count > kMaxRange) {
    return Error("Range too big. The sandbox blocks ranges larger than MAX_RANGE (", kMaxRange,
                 ").");
  }
  JINJA_CHECK(context.Allocate(static_cast<int64_t>(count * static_cast<Integer>(sizeof(Value)))));
  auto range = std::make_shared<Sequence>();
  range->kind = Sequence::Kind::kRange;
  range->range[0] = start;
  range->range[1] = stop;
  range->range[2] = step;
  for (Integer i = 0; i < count; ++i) range->items.emplace_back(start + i * step);
  return Value(std::shared_ptr<const Sequence>(std::move(range)));
}

}  // namespace qwend::jinja
