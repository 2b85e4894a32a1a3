// Reading a Bpe from tokenizer.json's "model".
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/absl_view.h"
#include "engine/tokenizer/bpe.h"
#include "engine/tokenizer/byte_alphabet.h"
#include "engine/tokenizer/json_fields.h"

namespace qwend {

using nlohmann::json;
using tokenizer_internal::BoolField;
using tokenizer_internal::BytesOfToken;
using tokenizer_internal::FieldError;
using tokenizer_internal::FindField;
using tokenizer_internal::StringField;

namespace {

absl::Status CheckOptions(const json& model, absl::string_view where) {
  const auto error = [&](absl::string_view key, absl::string_view what) {
    return FieldError(absl::StrCat(where, ".", key), what);
  };
  const std::string type = StringField(model, "type");
  // Files written before 2020 have no type; merges tell that they are BPE.
  const bool old_bpe = type.empty() && FindField(model, "merges") != nullptr;
  if (type != "BPE" && !old_bpe) {
    return error("type", absl::StrCat("'", type, "' is not supported, only BPE"));
  }
  if (BoolField(model, "byte_fallback", false)) {
    return error("byte_fallback", "not supported; only byte-level BPE is");
  }
  if (const json* dropout = FindField(model, "dropout"); dropout != nullptr && *dropout != 0) {
    return error("dropout", "not supported; ids would be random");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!StringField(model, key).empty()) return error(key, "not supported; must be empty");
  }
  return absl::OkStatus();
}

// The two tokens of one entry of "merges": ["a", "b"] or "a b".
bool ReadMerge(const json& entry, std::string_view* left, std::string_view* right) {
  if (entry.is_array()) {
    if (entry.size() != 2 || !entry[0].is_string() || !entry[1].is_string()) return false;
    *left = entry[0].get_ref<const std::string&>();
    *right = entry[1].get_ref<const std::string&>();
    return true;
  }
  if (!entry.is_string()) return false;
  const std::string_view line = entry.get_ref<const std::string&>();
  const size_t space = line.find(' ');
  if (space == line.npos || line.find(' ', space + 1) != line.npos) return false;
  *left = line.substr(0, space);
  *right = line.substr(space + 1);
  return true;
}

}  // namespace

absl::StatusOr<Bpe> Bpe::FromJson(const json& model, absl::string_view where) {
  if (absl::Status s = CheckOptions(model, where); !s.ok()) return s;
  const json* vocab = FindField(model, "vocab");
  const json* merges = FindField(model, "merges");
  const std::string vocab_where = absl::StrCat(where, ".vocab");
  const std::string merges_where = absl::StrCat(where, ".merges");
  if (vocab == nullptr || !vocab->is_object()) return FieldError(vocab_where, "must be an object");
  if (merges == nullptr || !merges->is_array()) {
    return FieldError(merges_where, "must be an array");
  }
  Bpe bpe;
  IdOfToken id_of_token;
  if (absl::Status s = bpe.ReadVocabulary(*vocab, vocab_where, &id_of_token); !s.ok()) return s;
  if (absl::Status s = bpe.ReadMerges(*merges, merges_where, id_of_token); !s.ok()) return s;
  // An unknown token is harmless where it can never be needed.
  const bool any_byte_missing =
      std::find(bpe.byte_token_.begin(), bpe.byte_token_.end(), -1) != bpe.byte_token_.end();
  if (any_byte_missing && FindField(model, "unk_token") != nullptr) {
    return FieldError(absl::StrCat(where, ".unk_token"),
                      "not supported with a vocabulary that lacks some of the 256 bytes");
  }
  bpe.CollectWords(BoolField(model, "ignore_merges", false));
  return bpe;
}

absl::Status Bpe::ReadVocabulary(const json& vocab, const std::string& where,
                                 IdOfToken* id_of_token) {
  int64_t size = 0;
  for (const auto& [token, id] : vocab.items()) {
    if (!id.is_number_integer() || id < 0 || id >= kMaxTokenId) {
      return FieldError(where, absl::StrCat("the id of '", token, "' must be an integer in [0, ",
                                            kMaxTokenId, ")"));
    }
    size = std::max(size, id.get<int64_t>() + 1);
  }
  std::vector<const std::string*> token_of_id(size);
  id_of_token->reserve(vocab.size());
  for (auto it = vocab.begin(); it != vocab.end(); ++it) {
    const auto id = it->get<int32_t>();
    if (token_of_id[id] != nullptr) {
      return FieldError(where, absl::StrCat("id ", id, " is given to '", *token_of_id[id],
                                            "' and to '", it.key(), "'"));
    }
    token_of_id[id] = &it.key();
    id_of_token->emplace(it.key(), id);
  }
  token_begin_.reserve(size + 1);
  in_alphabet_.resize(size);
  byte_token_.fill(-1);
  for (int64_t id = 0; id < size; ++id) {
    token_begin_.push_back(static_cast<uint32_t>(bytes_.size()));
    if (token_of_id[id] == nullptr) continue;
    const std::optional<std::string> bytes = BytesOfToken(*token_of_id[id]);
    const std::string& stands_for = bytes ? *bytes : *token_of_id[id];
    bytes_.insert(bytes_.end(), stands_for.begin(), stands_for.end());
    in_alphabet_[id] = bytes && !bytes->empty();
    if (bytes && bytes->size() == 1) {
      byte_token_[static_cast<uint8_t>(bytes->front())] = static_cast<int32_t>(id);
    }
    if (bytes_.size() > std::numeric_limits<int32_t>::max()) {
      return FieldError(where, "more than 2 GiB of tokens");
    }
  }
  token_begin_.push_back(static_cast<uint32_t>(bytes_.size()));
  return absl::OkStatus();
}

absl::Status Bpe::ReadMerges(const json& merges, const std::string& where,
                             const IdOfToken& id_of_token) {
  merges_.reserve(merges.size());
  uint32_t rank = 0;
  std::string merged;
  for (const json& entry : merges) {
    if (entry.is_string() && entry.get_ref<const std::string&>().rfind("#version", 0) == 0) {
      continue;
    }
    std::string_view left, right;
    if (!ReadMerge(entry, &left, &right)) {
      return FieldError(absl::StrCat(where, "[", rank, "]"), "must be \"a b\" or [\"a\", \"b\"]");
    }
    merged.assign(left).append(right);
    int32_t ids[3];
    const std::string_view tokens[3] = {left, right, merged};
    for (int i = 0; i < 3; ++i) {
      const auto it = id_of_token.find(AbslView(tokens[i]));
      if (it == id_of_token.end()) {
        return FieldError(absl::StrCat(where, "[", rank, "]"),
                          absl::StrCat("'", AbslView(tokens[i]), "' is not in model.vocab"));
      }
      ids[i] = it->second;
    }
    merges_.insert_or_assign(PairKey(ids[0], ids[1]), Merge{rank++, ids[2]});
  }
  return absl::OkStatus();
}

void Bpe::CollectWords(bool ignore_merges) {
  Scratch scratch;
  std::vector<int32_t> ids;
  absl::flat_hash_map<absl::string_view, int32_t> words;
  words.reserve(size());
  for (int32_t id = 0; id < size(); ++id) {
    if (!in_alphabet_[id]) continue;
    ids.clear();
    if (!ignore_merges) Encode(TokenBytes(id), &scratch, &ids);
    if (ignore_merges || (ids.size() == 1 && ids[0] == id))
      words.emplace(AbslView(TokenBytes(id)), id);
  }
  words_ = std::move(words);
}

}  // namespace qwend
