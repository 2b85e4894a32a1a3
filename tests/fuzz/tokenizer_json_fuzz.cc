// Loading of damaged tokenizer files: an error or a tokenizer that works, never a crash.
//
// Input: tokenizer.json, and after a zero byte tokenizer_config.json.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "engine/tokenizer/tokenizer_json.h"
#include "engine/tokenizer/utf8.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/json_mutator.h"

using qwend::fuzz::Check;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t zero = bytes.find('\0');
  const auto tokenizer = qwend::TokenizerFromJson(
      bytes.substr(0, zero), zero == bytes.npos ? std::string_view() : bytes.substr(zero + 1));
  if (!tokenizer.ok()) {
    Check(tokenizer.status().code() == absl::StatusCode::kInvalidArgument, "the status of a file");
    Check(!tokenizer.status().message().empty(), "an error says what");
    return 0;
  }
  const std::string text = "<s> cab  abc\u00E9e\u0301 12\n<t>aaaaaaaa " + std::string(80, 'b');
  for (const bool parse_special : {false, true}) {
    const auto ids = (*tokenizer)->Encode(text, parse_special);
    if (!ids.ok()) continue;  // a regex that runs into its limits
    for (const int32_t id : *ids) Check(id >= 0 && id < (*tokenizer)->size(), "an id in range");
    Check(qwend::IsValidUtf8((*tokenizer)->Decode(*ids, parse_special)), "decoded text is UTF-8");
  }
  for (int32_t id = -1; id <= std::min((*tokenizer)->size(), 1000); ++id) {
    (*tokenizer)->IsSpecial(id);
    Check((*tokenizer)->TokenBytes(id).size() <= size, "a token from the file");
  }
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const size_t zero = std::min(bytes.find('\0'), size);
  std::string mutated = qwend::fuzz::MutateJson(bytes.substr(0, zero), seed);
  if (zero < size) mutated += '\0' + qwend::fuzz::MutateJson(bytes.substr(zero + 1), seed + 1);
  if (mutated.size() > max_size) mutated.resize(max_size);
  std::memcpy(data, mutated.data(), mutated.size());
  return mutated.size();
}
