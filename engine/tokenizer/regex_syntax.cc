#include <cctype>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/tokenizer/absl_view.h"
#include "engine/tokenizer/regex.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {
namespace {

// The inside of a character class each. PCRE2's own \s has U+180E as well, its \w lacks marks, and
// its \h is horizontal space where Oniguruma's is a hexadecimal digit. A range stands last so that
// a '-' after it stays a plain character.
constexpr absl::string_view kSpace =
    R"(\x20\x85\xA0\x{1680}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{2000}-\x{200A}\t-\r)";
constexpr absl::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
constexpr absl::string_view kHexDigit = "a-fA-F0-9";

class Translator {
 public:
  explicit Translator(absl::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (at_ < in_.size() && error_.ok()) {
      switch (in_[at_]) {
        case '\\':
          Escape(/*in_class=*/false);
          break;
        case '[':
          Class();
          break;
        case '(':
          Group();
          break;
        case '{':
          Interval();
          break;
        default:
          out_ += in_[at_++];
      }
    }
    if (!error_.ok()) return error_;
    return std::move(out_);
  }

 private:
  void Fail(size_t at, absl::string_view what) {
    error_ =
        absl::InvalidArgumentError(absl::StrCat("regex '", in_, "', at byte ", at, ": ", what));
  }

  bool LooksAt(absl::string_view text) const { return in_.substr(at_, text.size()) == text; }

  void Set(bool in_class, bool negated, absl::string_view members) {
    if (!in_class) {
      absl::StrAppend(&out_, negated ? "[^" : "[", members, "]");
    } else if (negated) {
      Fail(at_, "a negated escape inside a class is not covered");
    } else {
      absl::StrAppend(&out_, members);
    }
    at_ += 2;
  }

  void Escape(bool in_class) {
    if (at_ + 1 == in_.size()) return Fail(at_, "nothing after the backslash");
    const char c = in_[at_ + 1];
    switch (c) {
      case 's':
      case 'S':
        return Set(in_class, c == 'S', kSpace);
      case 'w':
      case 'W':
        return Set(in_class, c == 'W', kWord);
      case 'h':
      case 'H':
        return Set(in_class, c == 'H', kHexDigit);
      case 'v':
        out_ += "\\x0B";
        at_ += 2;
        return;
      case 'p':
      case 'P':
        return Property();
      case 'x':
      case 'u':
        return Hex();
      case 'd':
      case 'D':
      case 'n':
      case 'r':
      case 't':
      case 'f':
      case 'a':
      case 'e':
        break;
      case 'A':
      case 'z':
      case 'Z':
        if (in_class) return Fail(at_, "an anchor inside a class");
        break;
      default:
        if (std::isalnum(static_cast<unsigned char>(c))) {
          return Fail(at_, absl::StrCat("the escape \\", std::string(1, c), " is not covered"));
        }
    }
    absl::StrAppend(&out_, in_.substr(at_, 2));
    at_ += 2;
  }

  // \p{L} is a general category in both; any other name must be a script.
  void Property() {
    const size_t close = in_.find('}', at_);
    if (in_.substr(at_ + 2, 1) != "{" || close == absl::string_view::npos) {
      return Fail(at_, "a property needs {name}");
    }
    absl::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    absl::StrAppend(&out_, in_.substr(at_, 3));
    if (name.substr(0, 1) == "^") {
      out_ += '^';
      name.remove_prefix(1);
    }
    absl::StrAppend(&out_, name.size() <= 2 ? "" : "sc:", name, "}");
    at_ = close + 1;
  }

  // \xHH, \x{H...} and \uHHHH, all of them a code point.
  void Hex() {
    const bool braced = LooksAt("\\x{");
    const size_t begin = at_ + (braced ? 3 : 2);
    const size_t most = braced ? 6 : in_[at_ + 1] == 'x' ? 2 : 4;
    size_t end = begin;
    while (end < in_.size() && end - begin < most &&
           std::isxdigit(static_cast<unsigned char>(in_[end]))) {
      ++end;
    }
    const absl::string_view digits = in_.substr(begin, end - begin);
    if (digits.empty() || (braced && in_.substr(end, 1) != "}") ||
        (in_[at_ + 1] == 'u' && digits.size() != 4)) {
      return Fail(at_, "a malformed code point");
    }
    if (!braced && most == 2 && digits.size() == 2 && digits[0] > '7') {
      return Fail(at_, "\\xHH above 7F means a byte; write \\x{HH}");
    }
    absl::StrAppend(&out_, "\\x{", digits, "}");
    at_ = end + (braced ? 1 : 0);
  }

  void Class() {
    const size_t begin = at_;
    out_ += in_[at_++];
    if (LooksAt("^")) out_ += in_[at_++];
    if (LooksAt("]")) {
      out_ += "\\]";
      ++at_;
    }
    while (at_ < in_.size() && error_.ok()) {
      if (LooksAt("]")) {
        out_ += in_[at_++];
        return;
      }
      if (LooksAt("[") || LooksAt("&&")) {
        return Fail(at_, "a class inside a class is not covered");
      }
      if (LooksAt("\\")) {
        Escape(/*in_class=*/true);
      } else {
        out_ += in_[at_++];
      }
    }
    if (error_.ok()) Fail(begin, "the class does not end");
  }

  void Group() {
    if (LooksAt("(*")) return Fail(at_, "a verb is not covered");
    if (!LooksAt("(?")) {
      out_ += in_[at_++];
      return;
    }
    for (absl::string_view open : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (LooksAt(open)) {
        absl::StrAppend(&out_, open);
        at_ += open.size();
        return;
      }
    }
    Fail(at_, "this kind of group is not covered");
  }

  // {n,m} alone means the same in both; Oniguruma reads {n,m}+ and {n}? unlike everybody else.
  void Interval() {
    size_t end = at_ + 1;
    while (end < in_.size() &&
           (std::isdigit(static_cast<unsigned char>(in_[end])) || in_[end] == ',')) {
      ++end;
    }
    const absl::string_view body = in_.substr(at_ + 1, end - at_ - 1);
    if (in_.substr(end, 1) != "}" || body.empty()) {
      out_ += "\\{";
      ++at_;
      return;
    }
    const absl::string_view next = in_.substr(end + 1, 1);
    if (body[0] == ',' || next == "+" || (next == "?" && body.find(',') == body.npos)) {
      return Fail(at_, "this form of interval is not covered");
    }
    absl::StrAppend(&out_, in_.substr(at_, end + 1 - at_));
    at_ = end + 1;
  }

  const absl::string_view in_;
  size_t at_ = 0;
  std::string out_;
  absl::Status error_;
};

}  // namespace

absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern) {
  if (!IsValidUtf8(pattern)) return absl::InvalidArgumentError("regex: not UTF-8");
  return Translator(AbslView(pattern)).Run();
}

}  // namespace qwend
