// Encode and Decode of the demo tokenizer on any bytes.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/utf8.h"
#include "tests/fuzz/check.h"

namespace {

using qwend::fuzz::Check;

const qwend::Tokenizer& Demo() {
  static const auto tokenizer = qwend::Tokenizer::Load(QWEND_SOURCE_DIR "/models/demo");
  Check(tokenizer.ok(), "the demo tokenizer loads");
  return **tokenizer;
}

void CheckText(const std::string& text) {
  const auto plain = Demo().Encode(text, /*parse_special=*/false);
  const auto parsed = Demo().Encode(text, /*parse_special=*/true);
  Check(plain.ok() == qwend::IsValidUtf8(text), "UTF-8 and nothing else is taken");
  Check(plain.ok() == parsed.ok(), "both ways take the same texts");
  if (!plain.ok()) {
    Check(plain.status().code() == absl::StatusCode::kInvalidArgument, "the status of bad text");
    return;
  }
  const auto normalized = qwend::NormalizeNfc(text);
  Check(normalized.ok(), "UTF-8 has a form C");
  Check(Demo().Decode(*plain, false) == *normalized, "decoding gives the normalized text");
  for (const int32_t id : *plain) {
    Check(id >= 0 && id < Demo().size() && !Demo().IsSpecial(id), "an ordinary token");
  }
  const auto again = qwend::NormalizeNfc(*normalized);
  Check(again.ok() && *again == *normalized, "form C of form C is the same");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  CheckText(bytes);
  std::string text;
  qwend::AppendUtf8Lossy(bytes, /*at_end=*/true, &text);
  CheckText(text);
  return 0;
}
