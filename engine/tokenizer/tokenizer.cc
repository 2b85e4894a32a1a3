#include "engine/tokenizer/tokenizer.h"

#include <algorithm>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/bpe.h"
#include "engine/tokenizer/byte_alphabet.h"
#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/tokenizer_json.h"
#include "engine/tokenizer/tokenizer_parts.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {
namespace {

using tokenizer_internal::BytesOfToken;
using tokenizer_internal::TokenizerParts;

constexpr size_t kMaxTextBytes = size_t{1} << 30;  // positions within a piece are 32 bits wide

// Matches the tokens with the given `normalized` flag, by their text as it is or in form C.
absl::StatusOr<AddedTokenMatcher> MakeMatcher(const AddedTokens& tokens, bool normalized,
                                              bool nfc) {
  std::vector<AddedTokenMatcher::Pattern> patterns;
  for (const AddedToken& token : tokens.all()) {
    if (token.normalized != normalized) continue;
    std::string text = token.content;
    if (normalized && nfc) {
      absl::StatusOr<std::string> composed = NormalizeNfc(text);
      if (!composed.ok()) return composed.status();
      text = *std::move(composed);
    }
    patterns.emplace_back(std::move(text), &token);
  }
  return AddedTokenMatcher(std::move(patterns));
}

class ByteLevelTokenizer : public Tokenizer {
 public:
  ByteLevelTokenizer(std::unique_ptr<const TokenizerParts> parts, AddedTokenMatcher raw,
                     AddedTokenMatcher normalized)
      : parts_(std::move(parts)),
        match_raw_(std::move(raw)),
        match_normalized_(std::move(normalized)),
        size_(parts_->bpe.size()) {
    for (const AddedToken& token : parts_->added.all()) size_ = std::max(size_, token.id + 1);
    special_.resize(size_);
    added_bytes_.resize(size_ - parts_->bpe.size());
    for (const AddedToken& token : parts_->added.all()) {
      special_[token.id] = token.special;
      if (token.id < parts_->bpe.size()) continue;
      // Decoding goes through the byte alphabet, as it does in Hugging Face's.
      added_bytes_[token.id - parts_->bpe.size()] =
          BytesOfToken(token.content).value_or(token.content);
    }
    for (int id = 0; id < parts_->bpe.size(); ++id) CountBytes(parts_->bpe.TokenBytes(id).size());
    for (const AddedToken& token : parts_->added.all()) {
      CountBytes(token.content.size());
      strips_ |= token.lstrip || token.rstrip;
    }
  }

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              bool parse_special) const override {
    if (const size_t bad = FindInvalidUtf8(text); bad != text.npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("the text is not valid UTF-8 (at byte ", bad, ")"));
    }
    if (text.size() > kMaxTextBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("the text has ", text.size(), " bytes; at most ", kMaxTextBytes, " fit"));
    }
    Encoding encoding;
    encoding.ids.reserve(text.size() / 4 + 1);
    const absl::Status status =
        !parse_special || match_raw_.empty()
            ? EncodeRaw(text, parse_special, &encoding)
            : match_raw_.Partition(text, [&](std::string_view part, const AddedToken* token) {
                if (token == nullptr) return EncodeRaw(part, parse_special, &encoding);
                encoding.ids.push_back(token->id);
                return absl::OkStatus();
              });
    if (!status.ok()) return status;
    return std::move(encoding.ids);
  }

  std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens) const override {
    std::string bytes;
    for (const int32_t id : ids) {
      if (!skip_special_tokens || !IsSpecial(id)) bytes += TokenBytes(id);
    }
    std::string text;
    text.reserve(bytes.size());
    AppendUtf8Lossy(bytes, /*at_end=*/true, &text);
    return text;
  }

  std::string_view TokenBytes(int32_t id) const override {
    if (id < 0 || id >= size_) return {};
    if (id < parts_->bpe.size()) return parts_->bpe.TokenBytes(id);
    return added_bytes_[id - parts_->bpe.size()];
  }

  bool IsSpecial(int32_t id) const override { return id >= 0 && id < size_ && special_[id]; }

  std::optional<int32_t> TokenId(std::string_view content) const override {
    const AddedToken* token = parts_->added.FindContent(content);
    if (token == nullptr) return std::nullopt;
    return token->id;
  }

  std::optional<int32_t> eos_token_id() const override { return parts_->eos_token_id; }
  std::string bos_token() const override { return parts_->bos_token; }
  std::string eos_token() const override { return parts_->eos_token; }
  int size() const override { return size_; }

  int64_t LeastTokens(std::string_view text) const override {
    if (strips_) return 0;  // a token may take any amount of blank space with it
    // NFC leaves ASCII alone and shortens other text to a third at most.
    const bool ascii = std::all_of(text.begin(), text.end(),
                                   [](char c) { return static_cast<signed char>(c) >= 0; });
    return static_cast<int64_t>(text.size()) / (max_token_bytes_ * (ascii ? 1 : 3));
  }

 private:
  void CountBytes(size_t bytes) {
    max_token_bytes_ = std::max(max_token_bytes_, static_cast<int64_t>(bytes));
  }

  struct Encoding {
    std::vector<int32_t> ids;
    Bpe::Scratch scratch;
  };

  // Text without added tokens that are looked for in raw text.
  absl::Status EncodeRaw(std::string_view text, bool parse_special, Encoding* encoding) const {
    std::string composed;
    if (parts_->nfc && MayNeedNfc(text)) {
      absl::StatusOr<std::string> normalized = NormalizeNfc(text);
      if (!normalized.ok()) return normalized.status();
      composed = *std::move(normalized);
      text = composed;
    }
    if (!parse_special || match_normalized_.empty()) return EncodeNormalized(text, encoding);
    return match_normalized_.Partition(text, [&](std::string_view part, const AddedToken* token) {
      if (token == nullptr) return EncodeNormalized(part, encoding);
      encoding->ids.push_back(token->id);
      return absl::OkStatus();
    });
  }

  absl::Status EncodeNormalized(std::string_view text, Encoding* encoding) const {
    return parts_->pre_tokenizer.Split(text, [&](std::string_view piece) {
      parts_->bpe.Encode(piece, &encoding->scratch, &encoding->ids);
      return absl::OkStatus();
    });
  }

  const std::unique_ptr<const TokenizerParts> parts_;
  const AddedTokenMatcher match_raw_;
  const AddedTokenMatcher match_normalized_;
  int size_;
  int64_t max_token_bytes_ = 1;
  bool strips_ = false;
  std::vector<bool> special_;             // [size]
  std::vector<std::string> added_bytes_;  // of the ids behind the byte-pair vocabulary
};

absl::StatusOr<std::string> ReadFile(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);  // fails for a folder
  std::ifstream in(path, std::ios::binary);
  std::string text(error ? 0 : size, '\0');
  if (error || !in.read(text.data(), static_cast<std::streamsize>(text.size()))) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": cannot be read"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFromJson(std::string_view tokenizer,
                                                             std::string_view tokenizer_config) {
  absl::StatusOr<std::unique_ptr<TokenizerParts>> parts =
      tokenizer_internal::ParseTokenizer(tokenizer, tokenizer_config);
  if (!parts.ok()) return parts.status();
  absl::StatusOr<AddedTokenMatcher> raw = MakeMatcher((*parts)->added, false, (*parts)->nfc);
  if (!raw.ok()) return raw.status();
  absl::StatusOr<AddedTokenMatcher> normalized = MakeMatcher((*parts)->added, true, (*parts)->nfc);
  if (!normalized.ok()) return normalized.status();
  return std::make_unique<ByteLevelTokenizer>(*std::move(parts), *std::move(raw),
                                              *std::move(normalized));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::filesystem::path& dir) {
  const std::filesystem::path path = dir / "tokenizer.json";
  const std::filesystem::path config_path = dir / "tokenizer_config.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(absl::StrCat(path.string(), ": no such file"));
  }
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  absl::StatusOr<std::string> config = std::string();
  if (std::filesystem::exists(config_path, error)) config = ReadFile(config_path);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = TokenizerFromJson(*text, *config);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        absl::StrCat(dir.string(), "/", tokenizer.status().message()));
  }
  return tokenizer;
}

}  // namespace qwend
