// Filters on text and on single values.
#include <array>

#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/methods.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

absl::StatusOr<Value> Trim(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("trim", arguments, {"chars"}));
  JINJA_ASSIGN(const std::string text, ToText(context, input));
  if (bound.IsNone(0)) {
    return context.NewText(std::string(Strip(text, true, true)), input.is_markup());
  }
  JINJA_ASSIGN(const std::string_view chars, bound.Text(0, ""));
  return context.NewText(std::string(Strip(text, chars, true, true)), input.is_markup());
}

template <std::string (*kMap)(std::string_view)>
absl::StatusOr<Value> MapCase(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("the filter", arguments, {}).status());
  JINJA_ASSIGN(const std::string text, ToText(context, input));
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  return context.NewText(kMap(text), input.is_markup());
}

// Unlike str.title, a word ends at blanks, hyphens and opening brackets only.
std::string TitleWords(std::string_view text) {
  std::string out;
  size_t begin = 0;
  const auto flush = [&](size_t end) {
    out += Capitalize(text.substr(begin, end - begin));
    begin = end;
  };
  for (size_t p = 0; p < text.size();) {
    const size_t at = p;
    const char32_t c = NextCodePoint(text, p);
    if (!IsSpace(c) && c != '-' && c != '(' && c != '{' && c != '[' && c != '<') continue;
    flush(at);
    out += text.substr(at, p - at);
    begin = p;
  }
  flush(text.size());
  return out;
}

absl::StatusOr<Value> TitleFilter(Context& context, const Value& input,
                                  const Arguments& arguments) {
  JINJA_CHECK(Bind("title", arguments, {}).status());
  JINJA_ASSIGN(const std::string text, ToText(context, input));
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  return context.NewText(TitleWords(text));
}

absl::StatusOr<Value> Replace(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("replace", arguments, {"old", "new", "count"}, 2));
  JINJA_ASSIGN(const std::string text, ToText(context, input));
  JINJA_ASSIGN(const std::string from, ToText(context, bound[0]));
  JINJA_ASSIGN(const std::string to, ToText(context, bound[1]));
  JINJA_ASSIGN(const Integer limit, bound.Int(2, -1));
  return ReplaceText(context, text, from, to, limit, /*markup=*/false);
}

absl::StatusOr<Value> Indent(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("indent", arguments, {"width", "first", "blank"}));
  JINJA_ASSIGN(const std::string text, ToText(context, input));
  std::string indention(4, ' ');
  if (bound.has(0) && bound[0].is_string()) {
    indention = bound[0].text();
  } else {
    JINJA_ASSIGN(const Integer width, bound.Int(0, 4));
    if (width > 1000) return Error("indent() takes a width of at most 1000");
    indention.assign(static_cast<size_t>(width < 0 ? 0 : width), ' ');
  }
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  const std::string ended = text + "\n";
  const std::vector<std::string_view> lines = SplitLines(ended, /*keep_ends=*/false);
  std::string out = bound.Bool(1, false) ? indention : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i > 0 && (!lines[i].empty() || bound.Bool(2, false))) out += indention;
    out += lines[i];
    if (static_cast<int64_t>(out.size()) > kMaxOutputBytes) return TooLong();
  }
  return context.NewText(std::move(out), input.is_markup());
}

absl::StatusOr<Value> StringFilter(Context& context, const Value& input,
                                   const Arguments& arguments) {
  JINJA_CHECK(Bind("string", arguments, {}).status());
  if (input.is_string()) return input;
  JINJA_ASSIGN(std::string text, ToText(context, input));
  return context.NewText(std::move(text));
}

absl::StatusOr<Value> Safe(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("safe", arguments, {}).status());
  JINJA_ASSIGN(std::string text, ToText(context, input));
  return context.NewText(std::move(text), /*markup=*/true);
}

absl::StatusOr<Value> Escape(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("escape", arguments, {}).status());
  if (input.is_markup()) return input;
  JINJA_ASSIGN(const std::string text, ToText(context, input));
  return context.NewText(EscapeHtml(text), /*markup=*/true);
}

absl::StatusOr<Value> Default(Context&, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound,
               Bind("default", arguments, {"default_value", "boolean"}));
  const bool replaced = input.is_undefined() || (bound.Bool(1, false) && !input.Truthy());
  if (!replaced) return input;
  return bound.has(0) ? bound[0] : Value(std::string());
}

absl::StatusOr<Value> AttributeFilter(Context& context, const Value& input,
                                      const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("attr", arguments, {"name"}, 1));
  JINJA_ASSIGN(const std::string_view name, bound.Text(0, ""));
  if (input.dict() != nullptr && !BindMethod(input, name).has_value()) {
    return Value(Undefined{Undefined::Kind::kAttribute, std::string(name), "dict object"});
  }
  return GetAttribute(context, input, name);
}

// tojson(separators=(between items, behind keys)).
absl::Status ReadSeparators(Context& context, const Value& separators, JsonStyle& style) {
  JINJA_ASSIGN(const std::vector<Value> pair, Iterate(context, separators));
  if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) {
    return Error("tojson() takes separators as a pair of strings");
  }
  style.item_separator = pair[0].text();
  style.key_separator = pair[1].text();
  return absl::OkStatus();
}

absl::StatusOr<Value> ToJsonFilter(Context& context, const Value& input,
                                   const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound,
               Bind("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"}));
  JsonStyle style;
  style.ensure_ascii = bound.Bool(0, false);
  style.sort_keys = bound.Bool(3, false);
  if (!bound.IsNone(1)) {
    style.multi_line = true;
    style.item_separator = std::string(1, ',');
    if (bound[1].is_string()) {
      style.indent = bound[1].text();
    } else {
      JINJA_ASSIGN(const Integer width, bound.Int(1, 0));
      if (width > 1000) return Error("tojson() takes an indent of at most 1000");
      style.indent.assign(static_cast<size_t>(width < 0 ? 0 : width), ' ');
    }
  }
  if (!bound.IsNone(2)) JINJA_CHECK(ReadSeparators(context, bound[2], style));
  JINJA_ASSIGN(std::string text, ToJson(context, input, style));
  return context.NewText(std::move(text));
}

constexpr std::array kFilters = {
    NamedBuiltin{"attr", AttributeFilter},
    NamedBuiltin{"capitalize", MapCase<Capitalize>},
    NamedBuiltin{"d", Default},
    NamedBuiltin{"default", Default},
    NamedBuiltin{"e", Escape},
    NamedBuiltin{"escape", Escape},
    NamedBuiltin{"indent", Indent},
    NamedBuiltin{"lower", MapCase<Lower>},
    NamedBuiltin{"replace", Replace},
    NamedBuiltin{"safe", Safe},
    NamedBuiltin{"string", StringFilter},
    NamedBuiltin{"title", TitleFilter},
    NamedBuiltin{"tojson", ToJsonFilter},
    NamedBuiltin{"trim", Trim},
    NamedBuiltin{"upper", MapCase<Upper>},
};

}  // namespace

Builtin FindTextFilter(std::string_view name) { return FindBuiltin(kFilters, name); }

}  // namespace qwend::jinja
