// What a template computes with: Python's values, as far as templates see them.
//
// Values are immutable and cheap to copy, except namespaces (assigned through `set ns.x`) and
// generators (read once). A namespace belongs to the Context of its rendering, so values refer to
// it without owning it and no cycle can keep memory alive.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace qwend::jinja {

using Integer = __int128;  // Python's integers have no bound; an overflow of this one is an error

class Callable;
class Context;
class Value;
struct Dict;
struct LoopState;
struct Namespace;
struct Sequence;

// Why something is undefined; becomes an error only where the template needs a value.
struct Undefined {
  enum class Kind { kName, kAttribute, kElement, kHint };
  Kind kind = Kind::kName;
  std::string name;   // variable, attribute or printed index; with kHint the whole message
  std::string owner;  // what has no such attribute: "list object"
  std::string Message() const;
};

struct Text {
  std::shared_ptr<const std::string> utf8;
  bool markup = false;  // came from `safe` or `escape`: `+` escapes its other operand
};

class Value {
 public:
  struct None {};
  using Storage =
      std::variant<std::shared_ptr<const Undefined>, None, bool, Integer, double, Text,
                   std::shared_ptr<const Sequence>, std::shared_ptr<const Dict>, Namespace*,
                   std::shared_ptr<const Callable>, std::shared_ptr<const LoopState>>;

  Value() : storage_(None{}) {}
  explicit Value(bool value) : storage_(value) {}
  explicit Value(int value) : storage_(Integer{value}) {}
  explicit Value(int64_t value) : storage_(Integer{value}) {}
  explicit Value(size_t value) : storage_(static_cast<Integer>(value)) {}
  explicit Value(Integer value) : storage_(value) {}
  explicit Value(double value) : storage_(value) {}
  explicit Value(std::string text, bool markup = false)
      : storage_(Text{std::make_shared<const std::string>(std::move(text)), markup}) {}
  explicit Value(Text text) : storage_(std::move(text)) {}
  explicit Value(const char*) = delete;
  explicit Value(Undefined undefined)
      : storage_(std::make_shared<const Undefined>(std::move(undefined))) {}
  explicit Value(std::shared_ptr<const Sequence> sequence) : storage_(std::move(sequence)) {}
  explicit Value(std::shared_ptr<const Dict> dict) : storage_(std::move(dict)) {}
  explicit Value(Namespace* ns) : storage_(ns) {}
  explicit Value(std::shared_ptr<const Callable> callable) : storage_(std::move(callable)) {}
  explicit Value(std::shared_ptr<const LoopState> loop) : storage_(std::move(loop)) {}

  bool is_undefined() const { return storage_.index() == 0; }
  bool is_none() const { return Is<None>(); }
  bool is_bool() const { return Is<bool>(); }
  bool is_int() const { return Is<Integer>(); }
  bool is_float() const { return Is<double>(); }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  bool is_string() const { return Is<Text>(); }

  // Each null or nullopt-like when the value is of another kind.
  const Undefined* undefined() const { return Pointer<Undefined>(); }
  const Sequence* sequence() const { return Pointer<Sequence>(); }
  const Dict* dict() const { return Pointer<Dict>(); }
  const Callable* callable() const { return Pointer<Callable>(); }
  const LoopState* loop() const { return Pointer<LoopState>(); }
  Namespace* name_space() const {
    const auto* ns = std::get_if<Namespace*>(&storage_);
    return ns == nullptr ? nullptr : *ns;
  }

  // Only after the matching is_...().
  bool boolean() const { return std::get<bool>(storage_); }
  const std::string& text() const { return *std::get<Text>(storage_).utf8; }
  bool is_markup() const { return is_string() && std::get<Text>(storage_).markup; }
  Integer integer() const {  // bool counts as 0 or 1, as in Python
    return is_bool() ? Integer{boolean()} : std::get<Integer>(storage_);
  }
  double number() const {
    return is_float() ? std::get<double>(storage_) : static_cast<double>(integer());
  }

  bool Same(const Value& other) const;  // Python's `is`: the same object, or an equal scalar
  bool Truthy() const;
  std::string_view TypeName() const;  // Python's: "str", "NoneType", "dict_items"
  int Depth() const;                  // levels of containers below and with this one; 0 for scalars
  const Storage& storage() const { return storage_; }

 private:
  template <typename T>
  bool Is() const {
    return std::holds_alternative<T>(storage_);
  }
  template <typename T>
  const T* Pointer() const {
    const auto* pointer = std::get_if<std::shared_ptr<const T>>(&storage_);
    return pointer == nullptr ? nullptr : pointer->get();
  }
  Storage storage_;
};

// A list, or one of its relatives.
struct Sequence {
  enum class Kind { kList, kTuple, kRange, kDictKeys, kDictValues, kDictItems, kGenerator };
  Kind kind = Kind::kList;
  std::vector<Value> items;
  Integer range[3] = {0, 0, 1};  // start, stop, step of a kRange, for printing
  int depth = 1;
  mutable bool consumed = false;  // generators give their items once

  bool indexable() const {
    return kind == Kind::kList || kind == Kind::kTuple || kind == Kind::kRange;
  }
};

// Keeps the order of insertion. Keys are scalars, or tuples of scalars (RequireHashable).
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  absl::flat_hash_map<std::string_view, size_t> index;  // string keys only
  int depth = 1;

  void Set(const Value& key, Value value);
  const Value* Find(const Value& key) const;
  const Value* Find(std::string_view key) const;

 private:
  size_t Position(const Value& key) const;  // entries.size() when absent
};

struct Namespace {
  Dict attributes;
};

// The variable `loop`.
struct LoopState {
  std::shared_ptr<const Sequence> items;
  mutable size_t index = 0;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// A function, bound method or macro.
class Callable {
 public:
  virtual ~Callable() = default;
  virtual absl::StatusOr<Value> Call(Context& context, const Arguments& arguments) const = 0;
  virtual std::string Repr() const = 0;
  virtual std::string_view type_name() const { return "function"; }
  virtual int depth() const { return 0; }
};

// Equality as Python's == of scalars and of tuples of scalars; 1 == 1.0 == True.
bool ScalarEqual(const Value& a, const Value& b);

}  // namespace qwend::jinja
