#include "engine/tokenizer/bpe.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/tokenizer/absl_view.h"

namespace qwend {
namespace {

constexpr uint32_t kNoMerge = std::numeric_limits<uint32_t>::max();
// Up to here looking at all pairs for each merge is faster than a heap.
constexpr size_t kShortPiece = 48;

// Orders a heap so that the lowest rank, then the leftmost position, comes out first.
struct ComesLater {
  bool operator()(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) const {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  }
};

}  // namespace

const Bpe::Merge* Bpe::FindMerge(int32_t left, int32_t right) const {
  const auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void Bpe::Encode(std::string_view piece, Scratch* scratch, std::vector<int32_t>* ids) const {
  const auto word = words_.find(AbslView(piece));
  if (word != words_.end()) {
    ids->push_back(word->second);
  } else if (piece.size() <= kShortPiece) {
    MergeShort(piece, ids);
  } else {
    MergeLong(piece, scratch, ids);
  }
}

void Bpe::MergeShort(std::string_view piece, std::vector<int32_t>* ids) const {
  int32_t symbols[kShortPiece];
  Merge merges[kShortPiece];  // of each symbol with the next
  int count = 0;
  for (const char c : piece) {
    const int32_t id = byte_token_[static_cast<uint8_t>(c)];
    if (id >= 0) symbols[count++] = id;
  }
  const auto look_up = [&](int i) {
    const Merge* merge = i + 1 < count ? FindMerge(symbols[i], symbols[i + 1]) : nullptr;
    merges[i] = merge == nullptr ? Merge{kNoMerge, -1} : *merge;
  };
  for (int i = 0; i < count; ++i) look_up(i);
  while (count > 1) {
    int best = 0;
    for (int i = 1; i + 1 < count; ++i) {
      if (merges[i].rank < merges[best].rank) best = i;
    }
    if (merges[best].rank == kNoMerge) break;
    symbols[best] = merges[best].merged;
    const size_t moved = count - best - 2;
    std::memmove(symbols + best + 1, symbols + best + 2, moved * sizeof symbols[0]);
    std::memmove(merges + best + 1, merges + best + 2, moved * sizeof merges[0]);
    --count;
    look_up(best);
    if (best > 0) look_up(best - 1);
  }
  ids->insert(ids->end(), symbols, symbols + count);
}

void Bpe::MergeLong(std::string_view piece, Scratch* scratch, std::vector<int32_t>* ids) const {
  auto& symbols = scratch->symbols;
  auto& heap = scratch->heap;
  symbols.clear();
  heap.clear();
  for (const char c : piece) {
    const int32_t id = byte_token_[static_cast<uint8_t>(c)];
    if (id < 0) continue;
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, index - 1, index + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  // The pair that begins at `left`, when there is one and it merges.
  const auto candidate = [&](int32_t left) -> Scratch::Candidate {
    if (left < 0 || symbols[left].next < 0) return {kNoMerge, left, 0, 0, 0};
    const int32_t a = symbols[left].id;
    const int32_t b = symbols[symbols[left].next].id;
    const Merge* merge = FindMerge(a, b);
    if (merge == nullptr) return {kNoMerge, left, 0, 0, 0};
    return {merge->rank, left, a, b, merge->merged};
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    const Scratch::Candidate c = candidate(static_cast<int32_t>(i));
    if (c.rank != kNoMerge) heap.push_back(c);
  }
  std::make_heap(heap.begin(), heap.end(), ComesLater());
  const auto push = [&](int32_t left) {
    const Scratch::Candidate c = candidate(left);
    if (c.rank == kNoMerge) return;
    heap.push_back(c);
    std::push_heap(heap.begin(), heap.end(), ComesLater());
  };
  while (!heap.empty()) {
    const Scratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), ComesLater());
    heap.pop_back();
    Scratch::Symbol& left = symbols[best.position];
    // Another merge may have taken one of the two since.
    if (left.id != best.left || left.next < 0 || symbols[left.next].id != best.right) continue;
    Scratch::Symbol& right = symbols[left.next];
    left.id = best.merged;
    left.next = right.next;
    if (right.next >= 0) symbols[right.next].prev = best.position;
    right.id = -1;
    push(left.prev);
    push(best.position);
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace qwend
