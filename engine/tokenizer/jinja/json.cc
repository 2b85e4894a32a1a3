// json.dumps, as the filter tojson of chat templates calls it.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

std::string FormatJsonFloat(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return FormatFloat(value);
}

void AppendUnicodeEscape(char32_t c, std::string& out) {
  if (c >= 0x10000) {
    absl::StrAppendFormat(&out, "\\u%04x", 0xd800 + ((static_cast<uint32_t>(c) - 0x10000) >> 10));
    absl::StrAppendFormat(&out, "\\u%04x", 0xdc00 + (static_cast<uint32_t>(c) & 0x3ff));
  } else {
    absl::StrAppendFormat(&out, "\\u%04x", static_cast<uint32_t>(c));
  }
}

class JsonWriter {
 public:
  JsonWriter(Context& context, const JsonStyle& style) : context_(context), style_(style) {}
  absl::Status Write(const Value& value, int level);
  std::string out;

 private:
  void WriteText(std::string_view text);
  void NewLine(int level);
  absl::StatusOr<std::string> KeyText(const Value& key) const;
  absl::Status WriteArray(const std::vector<Value>& items, int level);
  absl::Status WriteObject(const Dict& dict, int level);

  Context& context_;
  const JsonStyle& style_;
};

void JsonWriter::WriteText(std::string_view text) {
  out += '"';
  for (size_t position = 0; position < text.size();) {
    const size_t begin = position;
    const char32_t c = NextCodePoint(text, position);
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\b':
        out += "\\b";
        break;
      default:
        if (c < 0x20 || (style_.ensure_ascii && c > 0x7e)) {
          AppendUnicodeEscape(c, out);
        } else {
          out.append(text.substr(begin, position - begin));
        }
    }
  }
  out += '"';
}

void JsonWriter::NewLine(int level) {
  if (!style_.multi_line) return;
  out += '\n';
  for (int i = 0; i < level; ++i) out += style_.indent;
}

absl::StatusOr<std::string> JsonWriter::KeyText(const Value& key) const {
  if (key.is_string()) return key.text();
  if (key.is_none()) return std::string("null");
  if (key.is_bool()) return std::string(key.boolean() ? "true" : "false");
  if (key.is_int()) return FormatInteger(key.integer());
  if (key.is_float()) return FormatJsonFloat(key.number());
  return Error("keys must be str, int, float, bool or None, not ", key.TypeName());
}

absl::Status JsonWriter::WriteArray(const std::vector<Value>& items, int level) {
  out += '[';
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += style_.item_separator;
    NewLine(level + 1);
    JINJA_CHECK(Write(items[i], level + 1));
  }
  if (!items.empty()) NewLine(level);
  out += ']';
  return absl::OkStatus();
}

absl::Status JsonWriter::WriteObject(const Dict& dict, int level) {
  std::vector<std::pair<std::string, const Value*>> entries;
  for (const auto& [key, value] : dict.entries) {
    JINJA_ASSIGN(std::string text, KeyText(key));
    entries.emplace_back(std::move(text), &value);
  }
  if (style_.sort_keys) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  out += '{';
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i > 0) out += style_.item_separator;
    NewLine(level + 1);
    WriteText(entries[i].first);
    out += style_.key_separator;
    JINJA_CHECK(Write(*entries[i].second, level + 1));
  }
  if (!entries.empty()) NewLine(level);
  out += '}';
  return absl::OkStatus();
}

absl::Status JsonWriter::Write(const Value& value, int level) {
  const Context::Level nesting(context_);
  JINJA_CHECK(nesting.Check());
  JINJA_CHECK(context_.Spend(1));
  if (static_cast<int64_t>(out.size()) > kMaxOutputBytes) return TooLong();
  const Sequence* sequence = value.sequence();
  if (value.is_none()) {
    out += "null";
  } else if (value.is_bool()) {
    out += value.boolean() ? "true" : "false";
  } else if (value.is_int()) {
    out += FormatInteger(value.integer());
  } else if (value.is_float()) {
    out += FormatJsonFloat(value.number());
  } else if (value.is_string()) {
    JINJA_CHECK(context_.SpendBytes(value.text().size()));
    WriteText(value.text());
  } else if (sequence != nullptr && (sequence->kind == Sequence::Kind::kList ||
                                     sequence->kind == Sequence::Kind::kTuple)) {
    return WriteArray(sequence->items, level);
  } else if (const Dict* dict = value.dict()) {
    return WriteObject(*dict, level);
  } else {
    return Error("Object of type ", value.TypeName(), " is not JSON serializable");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ToJson(Context& context, const Value& value, const JsonStyle& style) {
  JsonWriter writer(context, style);
  JINJA_CHECK(writer.Write(value, 0));
  return std::move(writer.out);
}

}  // namespace qwend::jinja
