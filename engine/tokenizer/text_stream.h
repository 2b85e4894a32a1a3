// From token ids to what a caller may see: whole UTF-8 characters, and nothing of a stop string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/tokenizer.h"

namespace qwend {

// Turns ids into text as they come, holding back the bytes of an unfinished character.
class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens);
  std::string Append(int32_t id);  // the text that this id completes; may be empty
  std::string Flush();  // what is left, with U+FFFD for bytes that never became a character
 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  std::string pending_;
};

// Finds the first complete stop string in a stream of text, and holds back whatever could still
// become one: the longest end of the text that begins a stop string. The stop string that ends
// earliest wins; among those that end at the same character the earliest beginning. Empty stop
// strings are ignored. Matching is on bytes, in time linear in the text (Aho and Corasick, 1975);
// what is released is whole characters when text and stop strings are.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stop_strings, bool include_stop_string);
  struct Result {
    std::string text;                        // may be released now
    std::optional<std::string> stop_string;  // complete: the stream ends here
  };
  // Once a stop string is complete the rest of the text is dropped, here and in later calls.
  Result Append(std::string_view text);
  std::string Flush();  // the end came without a stop string: the held text is free

 private:
  // A node of the trie of all stop strings; 0 is the root.
  struct Node {
    uint8_t byte = 0;    // leads here from the parent
    int32_t depth = 0;   // bytes from the root
    int32_t child = -1;  // first of a list linked by `sibling`
    int32_t sibling = -1;
    int32_t shorter = 0;  // the node of this text's longest proper end that is in the trie
    int32_t stop = -1;    // index of the longest stop string that this text ends with
  };
  int32_t Child(int32_t node, uint8_t byte) const;
  int32_t Step(int32_t node, uint8_t byte) const;
  void LinkShorter();

  std::vector<std::string> stops_;
  bool include_;
  bool stopped_ = false;
  std::vector<Node> nodes_;
  int32_t node_ = 0;  // of the held text
  std::string held_;
};

}  // namespace qwend
