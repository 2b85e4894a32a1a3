#include <algorithm>
#include <array>

#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/methods.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

using Views = std::vector<std::string_view>;

absl::StatusOr<Value> TextList(Context& context, const Views& views, bool markup,
                               Sequence::Kind kind = Sequence::Kind::kList) {
  std::vector<Value> items;
  for (const std::string_view view : views) {
    JINJA_ASSIGN(Value item, context.NewText(std::string(view), markup));
    items.push_back(std::move(item));
  }
  return context.NewSequence(std::move(items), kind);
}

Views SplitOnSpace(std::string_view text, Integer limit) {
  Views parts;
  text = Strip(text, /*left=*/true, /*right=*/false);
  while (!text.empty()) {
    if (limit >= 0 && static_cast<Integer>(parts.size()) == limit) {
      parts.push_back(text);
      break;
    }
    size_t end = 0;
    for (size_t next = 0; end < text.size(); end = next) {
      if (IsSpace(NextCodePoint(text, next))) break;
    }
    parts.push_back(text.substr(0, end));
    text = Strip(text.substr(end), /*left=*/true, /*right=*/false);
  }
  return parts;
}

Views SplitOnSpaceFromRight(std::string_view text, Integer limit) {
  const Views characters = Characters(text);
  const auto is_space = [&](size_t i) {
    size_t position = 0;
    return IsSpace(NextCodePoint(characters[i], position));
  };
  const auto offset = [&](size_t i) {
    return i < characters.size() ? static_cast<size_t>(characters[i].data() - text.data())
                                 : text.size();
  };
  Views parts;
  for (size_t end = characters.size();;) {
    while (end > 0 && is_space(end - 1)) --end;
    if (end == 0) break;
    if (limit >= 0 && static_cast<Integer>(parts.size()) == limit) {
      parts.push_back(text.substr(0, offset(end)));
      break;
    }
    size_t begin = end;
    while (begin > 0 && !is_space(begin - 1)) --begin;
    parts.push_back(text.substr(offset(begin), offset(end) - offset(begin)));
    end = begin;
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

Views SplitOn(std::string_view text, std::string_view separator, Integer limit) {
  Views parts;
  for (;;) {
    const bool more = limit < 0 || static_cast<Integer>(parts.size()) < limit;
    const size_t at = more ? text.find(separator) : std::string_view::npos;
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + separator.size());
  }
}

Views SplitOnFromRight(std::string_view text, std::string_view separator, Integer limit) {
  Views parts;
  for (;;) {
    const bool more = limit < 0 || static_cast<Integer>(parts.size()) < limit;
    const size_t at = more ? text.rfind(separator) : std::string_view::npos;
    if (at == std::string_view::npos) break;
    parts.push_back(text.substr(at + separator.size()));
    text = text.substr(0, at);
  }
  parts.push_back(text);
  std::reverse(parts.begin(), parts.end());
  return parts;
}

template <bool kFromRight>
absl::StatusOr<Value> Split(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("split", arguments, {"sep", "maxsplit"}));
  JINJA_ASSIGN(const Integer limit, bound.Int(1, -1));
  const std::string& text = self.text();
  JINJA_CHECK(context.SpendBytes(text.size()));
  if (bound.IsNone(0)) {
    return TextList(context,
                    kFromRight ? SplitOnSpaceFromRight(text, limit) : SplitOnSpace(text, limit),
                    self.is_markup());
  }
  JINJA_ASSIGN(const std::string_view separator, bound.Text(0, ""));
  if (separator.empty()) return Error("empty separator");
  return TextList(
      context,
      kFromRight ? SplitOnFromRight(text, separator, limit) : SplitOn(text, separator, limit),
      self.is_markup());
}

template <bool kFromRight>
absl::StatusOr<Value> Partition(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("partition", arguments, {"sep"}, 1));
  JINJA_ASSIGN(const std::string_view separator, bound.Text(0, ""));
  if (separator.empty()) return Error("empty separator");
  const std::string_view text = self.text();
  const size_t at = kFromRight ? text.rfind(separator) : text.find(separator);
  Views parts;
  if (at != std::string_view::npos) {
    parts = {text.substr(0, at), separator, text.substr(at + separator.size())};
  } else if (kFromRight) {
    parts = {"", "", text};
  } else {
    parts = {text, "", ""};
  }
  return TextList(context, parts, self.is_markup(), Sequence::Kind::kTuple);
}

template <bool kLeft, bool kRight>
absl::StatusOr<Value> StripMethod(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("strip", arguments, {"chars"}));
  JINJA_CHECK(context.SpendBytes(self.text().size()));
  if (bound.IsNone(0)) {
    return context.NewText(std::string(Strip(self.text(), kLeft, kRight)), self.is_markup());
  }
  JINJA_ASSIGN(const std::string_view chars, bound.Text(0, ""));
  return context.NewText(std::string(Strip(self.text(), chars, kLeft, kRight)), self.is_markup());
}

template <bool kStart>
absl::StatusOr<Value> HasAffix(Context& context, const Value& self, const Arguments& arguments) {
  const char* name = kStart ? "startswith" : "endswith";
  JINJA_ASSIGN(const BoundArguments bound, Bind(name, arguments, {"affix", "start", "end"}, 1));
  JINJA_CHECK(RequireDefined(bound[0]));
  Value part = self;
  if (!bound.IsNone(1) || !bound.IsNone(2)) {
    JINJA_ASSIGN(part, GetSlice(context, self, bound.has(1) ? bound[1] : Value(),
                                bound.has(2) ? bound[2] : Value(), Value()));
  }
  const std::string_view text = part.text();
  std::vector<Value> affixes = {bound[0]};
  if (bound[0].sequence() != nullptr && bound[0].sequence()->kind == Sequence::Kind::kTuple) {
    affixes = bound[0].sequence()->items;
  }
  for (const Value& affix : affixes) {
    if (!affix.is_string()) {
      return Error(name, " first arg must be str or a tuple of str, not ", affix.TypeName());
    }
    if (kStart ? text.starts_with(affix.text()) : text.ends_with(affix.text())) return Value(true);
  }
  return Value(false);
}

template <std::string (*kMap)(std::string_view)>
absl::StatusOr<Value> MapCase(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("case", arguments, {}).status());
  JINJA_CHECK(context.SpendBytes(self.text().size() * 4));
  return context.NewText(kMap(self.text()), self.is_markup());
}

absl::StatusOr<Value> Replace(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("replace", arguments, {"old", "new", "count"}, 2));
  JINJA_ASSIGN(const std::string_view from, bound.Text(0, ""));
  JINJA_ASSIGN(const std::string_view to, bound.Text(1, ""));
  JINJA_ASSIGN(const Integer limit, bound.Int(2, -1));
  const bool escape = self.is_markup() && !bound[1].is_markup();
  return ReplaceText(context, self.text(), from, escape ? EscapeHtml(to) : std::string(to), limit,
                     self.is_markup());
}

// The bytes between the optional bounds `start` and `end` (arguments 1 and 2), counted in code
// points as slices are; -1 for a start behind the end of the text.
absl::StatusOr<std::pair<int64_t, std::string_view>> Window(Context& context, const Value& self,
                                                            const BoundArguments& bound) {
  const std::string_view text = self.text();
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  if (bound.IsNone(1) && bound.IsNone(2)) return std::pair<int64_t, std::string_view>(0, text);
  const auto length = static_cast<Integer>(CountCodePoints(text));
  JINJA_ASSIGN(Integer start, bound.Int(1, 0));
  JINJA_ASSIGN(Integer end, bound.Int(2, length));
  if (start > length) return std::pair<int64_t, std::string_view>(-1, "");
  if (start < 0) start = std::max<Integer>(0, start + length);
  if (end < 0) end += length;
  end = std::clamp<Integer>(end, start, length);
  const size_t from = ByteOffset(text, static_cast<size_t>(start));
  const size_t to = ByteOffset(text, static_cast<size_t>(end));
  return std::pair<int64_t, std::string_view>(static_cast<int64_t>(start),
                                              text.substr(from, to - from));
}

template <bool kFromRight, bool kMustExist>
absl::StatusOr<Value> FindMethod(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("find", arguments, {"sub", "start", "end"}, 1));
  JINJA_ASSIGN(const std::string_view part, bound.Text(0, ""));
  JINJA_ASSIGN(const auto window, Window(context, self, bound));
  const auto& [start, text] = window;
  const size_t at =
      start < 0 ? std::string_view::npos : (kFromRight ? text.rfind(part) : text.find(part));
  if (at != std::string_view::npos) {
    return Value(start + static_cast<int64_t>(CountCodePoints(text.substr(0, at))));
  }
  if (kMustExist) return Error("substring not found");
  return Value(-1);
}

absl::StatusOr<Value> Count(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("count", arguments, {"sub", "start", "end"}, 1));
  JINJA_ASSIGN(const std::string_view part, bound.Text(0, ""));
  JINJA_ASSIGN(const auto window, Window(context, self, bound));
  const auto& [start, text] = window;
  if (start < 0) return Value(0);
  if (part.empty()) return Value(CountCodePoints(text) + 1);
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos;
       at = text.find(part, at + part.size())) {
    ++count;
  }
  return Value(count);
}

absl::StatusOr<Value> Join(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("join", arguments, {"iterable"}, 1));
  JINJA_CHECK(RequireDefined(bound[0]));
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, bound[0]));
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!items[i].is_string()) {
      JINJA_CHECK(RequireDefined(items[i]));
      return Error("sequence item ", i, ": expected str instance, ", items[i].TypeName(), " found");
    }
    if (i > 0) out += self.text();
    const bool escape = self.is_markup() && !items[i].is_markup();
    out += escape ? EscapeHtml(items[i].text()) : items[i].text();
    if (static_cast<int64_t>(out.size()) > kMaxOutputBytes) return TooLong();
  }
  return context.NewText(std::move(out), self.is_markup());
}

absl::StatusOr<Value> SplitLinesMethod(Context& context, const Value& self,
                                       const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("splitlines", arguments, {"keepends"}));
  JINJA_CHECK(context.SpendBytes(self.text().size()));
  return TextList(context, SplitLines(self.text(), bound.Bool(0, false)), self.is_markup());
}

template <bool kStart>
absl::StatusOr<Value> RemoveAffix(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("removeprefix", arguments, {"affix"}, 1));
  JINJA_ASSIGN(const std::string_view affix, bound.Text(0, ""));
  std::string_view text = self.text();
  if (kStart && text.starts_with(affix)) text.remove_prefix(affix.size());
  if (!kStart && text.ends_with(affix)) text.remove_suffix(affix.size());
  return context.NewText(std::string(text), self.is_markup());
}

// True when every character is in the class and there is at least one.
template <bool (*kClass)(char32_t)>
absl::StatusOr<Value> All(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("is", arguments, {}).status());
  const std::string_view text = self.text();
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  for (size_t p = 0; p < text.size();) {
    if (!kClass(NextCodePoint(text, p))) return Value(false);
  }
  return Value(!text.empty());
}

bool IsAlphanumeric(char32_t c) { return IsAlpha(c) || IsNumeric(c) || IsDigit(c); }

// At least one letter of the wanted case, and none of the other.
template <bool (*kWanted)(char32_t)>
absl::StatusOr<Value> AllCased(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("is", arguments, {}).status());
  const std::string_view text = self.text();
  JINJA_CHECK(context.SpendBytes(text.size() * 4));
  bool found = false;
  for (size_t p = 0; p < text.size();) {
    const char32_t c = NextCodePoint(text, p);
    if (kWanted(c)) {
      found = true;
    } else if (IsCased(c)) {
      return Value(false);
    }
  }
  return Value(found);
}

constexpr std::array kMethods = {
    Method{"capitalize", MapCase<Capitalize>},
    Method{"count", Count},
    Method{"endswith", HasAffix<false>},
    Method{"find", FindMethod<false, false>},
    Method{"index", FindMethod<false, true>},
    Method{"isalnum", All<IsAlphanumeric>},
    Method{"isalpha", All<IsAlpha>},
    Method{"isdecimal", All<IsDecimal>},
    Method{"isdigit", All<IsDigit>},
    Method{"islower", AllCased<IsLower>},
    Method{"isnumeric", All<IsNumeric>},
    Method{"isspace", All<IsSpace>},
    Method{"isupper", AllCased<IsUpper>},
    Method{"join", Join},
    Method{"lower", MapCase<Lower>},
    Method{"lstrip", StripMethod<true, false>},
    Method{"partition", Partition<false>},
    Method{"removeprefix", RemoveAffix<true>},
    Method{"removesuffix", RemoveAffix<false>},
    Method{"replace", Replace},
    Method{"rfind", FindMethod<true, false>},
    Method{"rindex", FindMethod<true, true>},
    Method{"rpartition", Partition<true>},
    Method{"rsplit", Split<true>},
    Method{"rstrip", StripMethod<false, true>},
    Method{"split", Split<false>},
    Method{"splitlines", SplitLinesMethod},
    Method{"startswith", HasAffix<true>},
    Method{"strip", StripMethod<true, true>},
    Method{"swapcase", MapCase<SwapCase>},
    Method{"title", MapCase<Title>},
    Method{"upper", MapCase<Upper>},
};

}  // namespace

const Method* FindStringMethod(std::string_view name) {
  const auto* const found = std::find_if(kMethods.begin(), kMethods.end(),
                                         [&](const Method& method) { return method.name == name; });
  return found == kMethods.end() ? nullptr : found;
}

absl::StatusOr<Value> ReplaceText(Context& context, std::string_view text, std::string_view from,
                                  std::string_view to, Integer limit, bool markup) {
  JINJA_CHECK(context.SpendBytes(text.size()));
  std::string out;
  size_t position = 0;
  for (Integer done = 0; limit < 0 || done < limit; ++done) {
    size_t at = text.find(from, position);
    if (at == std::string_view::npos) break;
    size_t next = at + from.size();
    if (from.empty()) {  // between all characters, and at both ends
      out += to;
      if (at == text.size()) return context.NewText(std::move(out), markup);
      NextCodePoint(text, next);
      out += text.substr(at, next - at);
    } else {
      out += text.substr(position, at - position);
      out += to;
    }
    position = next;
    if (static_cast<int64_t>(out.size()) > kMaxOutputBytes) return TooLong();
  }
  out += text.substr(position);
  return context.NewText(std::move(out), markup);
}

}  // namespace qwend::jinja
