#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokenizer/regex.h"

#include <pcre2.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/absl_view.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {
namespace {

std::string ErrorText(int code) {
  char text[256] = "";
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
  return text;
}

template <auto kFree>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>>;

// What one match may cost. A run of white space backtracks once per character, so that the steps
// allowed grow with the text; what a bad pattern can do to a short text stays small.
MatchContext MakeMatchContext(size_t text_size) {
  MatchContext context(pcre2_match_context_create(nullptr));
  if (context == nullptr) return context;
  const size_t steps = std::min<size_t>(10'000'000 + 8 * text_size, UINT32_MAX);
  pcre2_set_match_limit(context.get(), static_cast<uint32_t>(steps));
  pcre2_set_heap_limit(context.get(), 256 << 10);  // KiB
  return context;
}

// Where `code` matches `text` at or after `from`, into `data`. Returns PCRE2's code.
int MatchFrom(const pcre2_code* code, std::string_view text, size_t from, pcre2_match_data* data,
              pcre2_match_context* context) {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int rc = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, data, context);
  // The interpreter backtracks on the heap, so what is too deep for the JIT's stack still ends.
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
    rc = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data,
                     context);
  }
  return rc;
}

}  // namespace

absl::StatusOr<Regex> Regex::CompilePcre(std::string_view pattern, unsigned options) {
  const CompileContext context(pcre2_compile_context_create(nullptr));
  if (context == nullptr) return absl::ResourceExhaustedError("regex: out of memory");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   options, &error, &offset, context.get());
  if (code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("regex '", AbslView(pattern), "', at byte ", offset, ": ", ErrorText(error)));
  }
  // Without a JIT (a build or a kernel that has none) the interpreter serves, only slower.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return Regex(std::shared_ptr<const void>(code, [](const void* p) {
    pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(p)));
  }));
}

absl::StatusOr<Regex> Regex::Compile(std::string_view pattern) {
  absl::StatusOr<std::string> translated = TranslateOniguruma(pattern);
  if (!translated.ok()) return translated.status();
  return CompilePcre(*translated,
                     PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C);
}

absl::StatusOr<Regex> Regex::CompileLiteral(std::string_view literal) {
  return CompilePcre(literal, PCRE2_UTF | PCRE2_LITERAL);
}

absl::Status Regex::Partition(std::string_view text,
                              absl::FunctionRef<absl::Status(std::string_view)> piece) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  const MatchData data(pcre2_match_data_create_from_pattern(code, nullptr));
  const MatchContext context = MakeMatchContext(text.size());
  if (data == nullptr || context == nullptr)
    return absl::ResourceExhaustedError("regex: out of memory");
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
  size_t done = 0;            // everything before it has been handed out
  size_t search = 0;          // where the next match may begin
  bool matched_here = false;  // a match ended at `search`, so an empty one there does not count
  while (search <= text.size()) {
    const int rc = MatchFrom(code, text, search, data.get(), context.get());
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) {
      return absl::InternalError(absl::StrCat("the pre-tokenizer's regex failed at byte ", search,
                                              " of ", text.size(), ": ", ErrorText(rc)));
    }
    const size_t begin = bounds[0];
    const size_t end = bounds[1];
    if (begin == end && matched_here && begin == search) {
      if (search == text.size()) break;
      NextCodePoint(text, &search);
      matched_here = false;
      continue;
    }
    if (begin < done || end < begin) {
      return absl::InternalError("the pre-tokenizer's regex matched backwards (\\K)");
    }
    if (begin > done) {
      if (absl::Status s = piece(text.substr(done, begin - done)); !s.ok()) return s;
    }
    if (end > begin) {
      if (absl::Status s = piece(text.substr(begin, end - begin)); !s.ok()) return s;
    }
    done = search = end;
    matched_here = true;
  }
  if (done < text.size()) return piece(text.substr(done));
  return absl::OkStatus();
}

}  // namespace qwend
