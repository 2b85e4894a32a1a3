#include "engine/tokenizer/tokenizer_parts.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/tokenizer/json_fields.h"

namespace qwend::tokenizer_internal {

using nlohmann::json;

namespace {

constexpr absl::string_view kFile = "tokenizer.json";
constexpr absl::string_view kConfigFile = "tokenizer_config.json";

absl::StatusOr<json> ParseObject(std::string_view text, absl::string_view file) {
  json result;
  try {
    result = json::parse(text);
  } catch (const json::exception& e) {
    return FieldError(file, e.what());
  }
  if (!result.is_object()) return FieldError(file, "must hold a JSON object");
  return result;
}

absl::StatusOr<AddedToken> ReadAddedToken(const json& entry, int64_t id, absl::string_view where) {
  if (id < 0 || id >= kMaxTokenId) {
    return FieldError(where, absl::StrCat("the id must be an integer in [0, ", kMaxTokenId, ")"));
  }
  const json* content = FindField(entry, "content");
  if (content == nullptr || !content->is_string()) {
    return FieldError(absl::StrCat(where, ".content"), "must be a string");
  }
  AddedToken token;
  token.id = static_cast<int32_t>(id);
  token.content = content->get<std::string>();
  token.special = BoolField(entry, "special", false);
  token.single_word = BoolField(entry, "single_word", false);
  token.lstrip = BoolField(entry, "lstrip", false);
  token.rstrip = BoolField(entry, "rstrip", false);
  token.normalized = BoolField(entry, "normalized", !token.special);
  return token;
}

absl::Status AddToken(const json& entry, int64_t id, absl::string_view where, AddedTokens* tokens) {
  absl::StatusOr<AddedToken> token = ReadAddedToken(entry, id, where);
  if (!token.ok()) return token.status();
  const absl::Status status = tokens->Add(*std::move(token));
  return status.ok() ? status : FieldError(where, status.message());
}

absl::Status ReadAddedTokens(const json& root, AddedTokens* tokens) {
  const json* list = FindField(root, "added_tokens");
  if (list == nullptr) return absl::OkStatus();
  const std::string where = absl::StrCat(kFile, ": added_tokens");
  if (!list->is_array()) return FieldError(where, "must be an array");
  for (size_t i = 0; i < list->size(); ++i) {
    const json* id = FindField((*list)[i], "id");
    const bool whole = id != nullptr && id->is_number_integer() && *id < kMaxTokenId;
    if (absl::Status s = AddToken((*list)[i], whole ? id->get<int64_t>() : -1,
                                  absl::StrCat(where, "[", i, "]"), tokens);
        !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

absl::Status ReadAddedTokensDecoder(const json& config, AddedTokens* tokens) {
  const json* map = FindField(config, "added_tokens_decoder");
  if (map == nullptr) return absl::OkStatus();
  const std::string where = absl::StrCat(kConfigFile, ": added_tokens_decoder");
  if (!map->is_object()) return FieldError(where, "must be an object");
  for (const auto& [key, entry] : map->items()) {
    int64_t id = -1;
    if (!absl::SimpleAtoi(key, &id)) id = -1;
    if (absl::Status s = AddToken(entry, id, absl::StrCat(where, ".", key), tokens); !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

// An id that both have must spell the same token, and the other way round.
absl::Status CheckAgainstVocabulary(const json& vocab, const Bpe& bpe, const AddedTokens& tokens) {
  for (const AddedToken& token : tokens.all()) {
    const json* id = FindField(vocab, token.content);
    const bool same_id = id != nullptr && *id == token.id;
    const bool taken = token.id < bpe.size() && !bpe.TokenBytes(token.id).empty();
    if (same_id || (id == nullptr && !taken)) continue;
    return FieldError(kFile, absl::StrCat("added token '", token.content, "' has id ", token.id,
                                          ", where model.vocab has another token"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ReadNormalizer(const json& root) {
  const json* normalizer = FindField(root, "normalizer");
  if (normalizer == nullptr) return false;
  const std::string type = StringField(*normalizer, "type");
  if (type == "NFC") return true;
  if (type == "Sequence") {
    const json* steps = FindField(*normalizer, "normalizers");
    if (steps != nullptr && steps->is_array()) {
      bool all_nfc = true;
      for (const json& step : *steps) all_nfc &= StringField(step, "type") == "NFC";
      if (all_nfc) return !steps->empty();
    }
  }
  return FieldError(absl::StrCat(kFile, ": normalizer.type"),
                    absl::StrCat("'", type, "' is not supported, only NFC or null"));
}

// "<s>", or {"content": "<s>", ...}; empty when unset.
std::string NamedToken(const json& config, const std::string& key) {
  const json* field = FindField(config, key);
  if (field == nullptr) return {};
  return field->is_object() ? StringField(*field, "content") : StringField(config, key);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenizerParts>> ParseTokenizer(std::string_view tokenizer,
                                                               std::string_view tokenizer_config) {
  absl::StatusOr<json> root = ParseObject(tokenizer, kFile);
  if (!root.ok()) return root.status();
  absl::StatusOr<json> config = json::object();
  if (!tokenizer_config.empty()) config = ParseObject(tokenizer_config, kConfigFile);
  if (!config.ok()) return config.status();

  const absl::StatusOr<bool> nfc = ReadNormalizer(*root);
  if (!nfc.ok()) return nfc.status();
  const json* decoder = FindField(*root, "decoder");
  const std::string decoder_type = decoder == nullptr ? "" : StringField(*decoder, "type");
  if (decoder_type != "ByteLevel") {
    return FieldError(absl::StrCat(kFile, ": decoder.type"),
                      absl::StrCat("'", decoder_type, "' is not supported, only ByteLevel"));
  }
  const std::string pre_where = absl::StrCat(kFile, ": pre_tokenizer");
  const json* pre = FindField(*root, "pre_tokenizer");
  if (pre == nullptr) return FieldError(pre_where, "is missing");
  absl::StatusOr<PreTokenizer> pre_tokenizer = PreTokenizer::FromJson(*pre, pre_where);
  if (!pre_tokenizer.ok()) return pre_tokenizer.status();

  const std::string model_where = absl::StrCat(kFile, ": model");
  const json* model = FindField(*root, "model");
  if (model == nullptr) return FieldError(model_where, "is missing");
  absl::StatusOr<Bpe> bpe = Bpe::FromJson(*model, model_where);
  if (!bpe.ok()) return bpe.status();

  AddedTokens added;
  if (absl::Status s = ReadAddedTokens(*root, &added); !s.ok()) return s;
  if (absl::Status s = ReadAddedTokensDecoder(*config, &added); !s.ok()) return s;
  const json& vocab = *FindField(*model, "vocab");
  if (absl::Status s = CheckAgainstVocabulary(vocab, *bpe, added); !s.ok()) return s;

  std::string eos_token = NamedToken(*config, "eos_token");
  std::optional<int32_t> eos_id;
  if (const AddedToken* token = added.FindContent(eos_token)) {
    eos_id = token->id;
  } else if (const json* id = eos_token.empty() ? nullptr : FindField(vocab, eos_token)) {
    eos_id = id->get<int32_t>();
  }
  return std::make_unique<TokenizerParts>(TokenizerParts{
      .bpe = *std::move(bpe),
      .pre_tokenizer = *std::move(pre_tokenizer),
      .added = std::move(added),
      .nfc = *nfc,
      .bos_token = NamedToken(*config, "bos_token"),
      .eos_token = std::move(eos_token),
      .eos_token_id = eos_id,
  });
}

}  // namespace qwend::tokenizer_internal
