#include "engine/tokenizer/jinja/value.h"

#include <algorithm>

#include "engine/tokenizer/jinja/cat.h"
#include "engine/tokenizer/jinja/print.h"

namespace qwend::jinja {
namespace {

std::string_view SequenceTypeName(Sequence::Kind kind) {
  switch (kind) {
    case Sequence::Kind::kList:
      return "list";
    case Sequence::Kind::kTuple:
      return "tuple";
    case Sequence::Kind::kRange:
      return "range";
    case Sequence::Kind::kDictKeys:
      return "dict_keys";
    case Sequence::Kind::kDictValues:
      return "dict_values";
    case Sequence::Kind::kDictItems:
      return "dict_items";
    case Sequence::Kind::kGenerator:
      return "generator";
  }
  return "list";
}

bool TupleEqual(const Sequence& a, const Sequence& b) {
  if (a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i) {
    if (!ScalarEqual(a.items[i], b.items[i])) return false;
  }
  return true;
}

}  // namespace

std::string Undefined::Message() const {
  switch (kind) {
    case Kind::kName:
      return Cat(ReprText(name), " is undefined");
    case Kind::kAttribute:
      return Cat(ReprText(owner), " has no attribute ", ReprText(name));
    case Kind::kElement:
      return Cat(owner, " has no element ", name);
    case Kind::kHint:
      break;
  }
  return name;
}

bool Value::Same(const Value& other) const {
  if (storage_.index() != other.storage_.index()) return false;
  if (is_undefined()) return undefined() == other.undefined();
  if (const Sequence* s = sequence()) return s == other.sequence();
  if (const Dict* d = dict()) return d == other.dict();
  if (const Callable* c = callable()) return c == other.callable();
  if (const LoopState* l = loop()) return l == other.loop();
  if (Namespace* ns = name_space()) return ns == other.name_space();
  return ScalarEqual(*this, other);
}

bool Value::Truthy() const {
  if (is_undefined() || is_none()) return false;
  if (is_bool() || is_int()) return integer() != 0;
  if (is_float()) return number() != 0;
  if (is_string()) return !text().empty();
  if (const Sequence* s = sequence()) {
    return s->kind == Sequence::Kind::kGenerator || !s->items.empty();
  }
  if (const Dict* d = dict()) return !d->entries.empty();
  return true;
}

std::string_view Value::TypeName() const {
  if (is_undefined()) return "Undefined";
  if (is_none()) return "NoneType";
  if (is_bool()) return "bool";
  if (is_int()) return "int";
  if (is_float()) return "float";
  if (is_string()) return is_markup() ? "Markup" : "str";
  if (const Sequence* s = sequence()) return SequenceTypeName(s->kind);
  if (dict() != nullptr) return "dict";
  if (name_space() != nullptr) return "Namespace";
  if (const Callable* c = callable()) return c->type_name();
  return "LoopContext";
}

int Value::Depth() const {
  if (const Sequence* s = sequence()) return s->depth;
  if (const Dict* d = dict()) return d->depth;
  if (const Callable* c = callable()) return c->depth();
  if (const LoopState* l = loop()) return l->items->depth + 1;
  return 0;
}

void Dict::Set(const Value& key, Value value) {
  depth = std::max({depth, key.Depth() + 1, value.Depth() + 1});
  const size_t position = Position(key);
  if (position < entries.size()) {
    entries[position].second = std::move(value);
    return;
  }
  entries.emplace_back(key, std::move(value));
  if (key.is_string()) index.emplace(entries.back().first.text(), position);
}

const Value* Dict::Find(std::string_view key) const {
  const auto it = index.find(key);
  return it == index.end() ? nullptr : &entries[it->second].second;
}

const Value* Dict::Find(const Value& key) const {
  const size_t position = Position(key);
  return position < entries.size() ? &entries[position].second : nullptr;
}

size_t Dict::Position(const Value& key) const {
  if (key.is_string()) {
    const auto it = index.find(key.text());
    return it == index.end() ? entries.size() : it->second;
  }
  if (index.size() == entries.size()) return entries.size();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (ScalarEqual(entries[i].first, key)) return i;
  }
  return entries.size();
}

bool ScalarEqual(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return a.number() == b.number();
    return a.integer() == b.integer();
  }
  if (a.is_string() && b.is_string()) return a.text() == b.text();
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.sequence() != nullptr && b.sequence() != nullptr &&
      a.sequence()->kind == Sequence::Kind::kTuple &&
      b.sequence()->kind == Sequence::Kind::kTuple) {
    return TupleEqual(*a.sequence(), *b.sequence());
  }
  return false;
}

}  // namespace qwend::jinja
