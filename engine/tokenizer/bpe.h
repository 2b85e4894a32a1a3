// Byte-pair encoding over raw bytes: a vocabulary, and merges ranked by the order they were learnt.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace qwend {

// Ids at or above this are refused when a tokenizer is loaded: they size tables.
inline constexpr int64_t kMaxTokenId = int64_t{1} << 22;

// Immutable after FromJson; usable from any thread.
class Bpe {
 public:
  // `model` is tokenizer.json's "model" of type BPE, its tokens in GPT-2's byte alphabet.
  // INVALID_ARGUMENT names the key at fault, or an option that byte-level BPE has no use for;
  // `where` begins the message.
  static absl::StatusOr<Bpe> FromJson(const nlohmann::json& model, absl::string_view where);
  Bpe(Bpe&&) = default;
  Bpe& operator=(Bpe&&) = default;

  // What an Encode needs room for; give the same one to successive calls of one thread.
  struct Scratch {
    struct Symbol {
      int32_t id;    // -1: merged into the symbol before it
      int32_t prev;  // index of the neighbour, -1 at the ends
      int32_t next;
    };
    struct Candidate {
      uint32_t rank;
      int32_t position;  // index of the left symbol
      int32_t left, right, merged;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  // Appends the ids of one piece of the pre-tokenizer (below 2 GiB): the merge of lowest rank
  // first, the leftmost among equals. A byte that the vocabulary lacks is left out, as in Hugging
  // Face's. Time is n log n.
  void Encode(std::string_view piece, Scratch* scratch, std::vector<int32_t>* ids) const;

  int size() const { return static_cast<int>(token_begin_.size()) - 1; }  // highest id + 1
  // Raw bytes; a token with a character outside the byte alphabet stands for itself. Empty for an
  // id without a token.
  std::string_view TokenBytes(int32_t id) const {
    return {bytes_.data() + token_begin_[id], token_begin_[id + 1] - token_begin_[id]};
  }

 private:
  Bpe() = default;
  struct Merge {
    uint32_t rank;
    int32_t merged;
  };
  using IdOfToken = absl::flat_hash_map<absl::string_view, int32_t>;  // by the file's spelling

  static uint64_t PairKey(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  absl::Status ReadVocabulary(const nlohmann::json& vocab, const std::string& where,
                              IdOfToken* id_of_token);
  absl::Status ReadMerges(const nlohmann::json& merges, const std::string& where,
                          const IdOfToken& id_of_token);
  // Fills words_ with the tokens whose bytes encode to themselves, or all with `ignore_merges`.
  void CollectWords(bool ignore_merges);
  void MergeShort(std::string_view piece, std::vector<int32_t>* ids) const;
  void MergeLong(std::string_view piece, Scratch* scratch, std::vector<int32_t>* ids) const;
  const Merge* FindMerge(int32_t left, int32_t right) const;

  std::vector<char> bytes_;              // of all tokens, by id
  std::vector<uint32_t> token_begin_;    // [size + 1] offsets into bytes_
  std::vector<bool> in_alphabet_;        // [size] made of alphabet characters only, not empty
  std::array<int32_t, 256> byte_token_;  // -1: no such token
  absl::flat_hash_map<uint64_t, Merge> merges_;  // by PairKey
  // Pieces that are one token, which most words of a text are. The keys point into bytes_, whose
  // block stays put when a Bpe is moved.
  absl::flat_hash_map<absl::string_view, int32_t> words_;
};

}  // namespace qwend
