#include "engine/tokenizer/jinja/from_json.h"

#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<Value> Convert(Context& context, const Json& json, int depth);

absl::StatusOr<Value> ConvertArray(Context& context, const Json& json, int depth) {
  std::vector<Value> items;
  items.reserve(json.size());
  for (const Json& element : json) {
    JINJA_ASSIGN(Value item, Convert(context, element, depth + 1));
    items.push_back(std::move(item));
  }
  return context.NewSequence(std::move(items));
}

absl::StatusOr<Value> ConvertObject(Context& context, const Json& json, int depth) {
  Dict dict;
  for (auto it = json.begin(); it != json.end(); ++it) {
    JINJA_ASSIGN(const Value key, context.NewText(it.key()));
    JINJA_ASSIGN(Value value, Convert(context, it.value(), depth + 1));
    dict.Set(key, std::move(value));
  }
  return context.NewDict(std::move(dict));
}

absl::StatusOr<Value> Convert(Context& context, const Json& json, int depth) {
  if (depth >= kMaxValueDepth) {
    return Error("messages or tools are nested more than ", kMaxValueDepth, " levels deep");
  }
  switch (json.type()) {
    case Json::value_t::null:
      return Value();
    case Json::value_t::boolean:
      return Value(json.get<bool>());
    case Json::value_t::number_integer:
      return Value(json.get<int64_t>());
    case Json::value_t::number_unsigned:
      return Value(static_cast<Integer>(json.get<uint64_t>()));
    case Json::value_t::number_float:
      return Value(json.get<double>());
    case Json::value_t::string:
      return context.NewText(json.get_ref<const std::string&>());
    case Json::value_t::array:
      return ConvertArray(context, json, depth);
    case Json::value_t::object:
      return ConvertObject(context, json, depth);
    case Json::value_t::binary:
    case Json::value_t::discarded:
      break;
  }
  return Error("messages or tools hold a ", json.type_name(), ", which is not JSON");
}

}  // namespace

absl::StatusOr<Value> FromJson(Context& context, const Json& json) {
  return Convert(context, json, 0);
}

}  // namespace qwend::jinja
