#include "engine/tokenizer/text_stream.h"

#include <utility>

#include "engine/tokenizer/utf8.h"

namespace qwend {

Detokenizer::Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
    : tokenizer_(tokenizer), skip_special_(skip_special_tokens) {}

std::string Detokenizer::Append(int32_t id) {
  if (skip_special_ && tokenizer_.IsSpecial(id)) return {};
  pending_ += tokenizer_.TokenBytes(id);
  std::string text;
  pending_.erase(0, AppendUtf8Lossy(pending_, /*at_end=*/false, &text));
  return text;
}

std::string Detokenizer::Flush() {
  std::string text;
  AppendUtf8Lossy(pending_, /*at_end=*/true, &text);
  pending_.clear();
  return text;
}

StopMatcher::StopMatcher(std::vector<std::string> stop_strings, bool include_stop_string)
    : stops_(std::move(stop_strings)), include_(include_stop_string), nodes_(1) {
  for (size_t i = 0; i < stops_.size(); ++i) {
    if (stops_[i].empty()) continue;
    int32_t node = 0;
    for (const char c : stops_[i]) {
      const auto byte = static_cast<uint8_t>(c);
      int32_t child = Child(node, byte);
      if (child < 0) {
        child = static_cast<int32_t>(nodes_.size());
        nodes_.push_back(
            {.byte = byte, .depth = nodes_[node].depth + 1, .sibling = nodes_[node].child});
        nodes_[node].child = child;
      }
      node = child;
    }
    nodes_[node].stop = static_cast<int32_t>(i);
  }
  LinkShorter();
}

// Breadth first, so that the shorter texts are linked before the longer ones need them.
void StopMatcher::LinkShorter() {
  std::vector<int32_t> queue = {0};
  for (size_t i = 0; i < queue.size(); ++i) {
    const int32_t parent = queue[i];
    for (int32_t n = nodes_[parent].child; n >= 0; n = nodes_[n].sibling) {
      Node& node = nodes_[n];
      node.shorter = parent == 0 ? 0 : Step(nodes_[parent].shorter, node.byte);
      if (node.stop < 0) node.stop = nodes_[node.shorter].stop;
      queue.push_back(n);
    }
  }
}

int32_t StopMatcher::Child(int32_t node, uint8_t byte) const {
  int32_t child = nodes_[node].child;
  while (child >= 0 && nodes_[child].byte != byte) child = nodes_[child].sibling;
  return child;
}

// From the text of `node` to the longest end of that text plus `byte` that begins a stop string.
int32_t StopMatcher::Step(int32_t node, uint8_t byte) const {
  for (;; node = nodes_[node].shorter) {
    const int32_t child = Child(node, byte);
    if (child >= 0) return child;
    if (node == 0) return 0;
  }
}

StopMatcher::Result StopMatcher::Append(std::string_view text) {
  Result result;
  if (stopped_) return result;
  for (size_t i = 0; i < text.size(); ++i) {
    node_ = Step(node_, static_cast<uint8_t>(text[i]));
    if (nodes_[node_].stop < 0) continue;
    const std::string& stop = stops_[nodes_[node_].stop];
    stopped_ = true;
    result.stop_string = stop;
    result.text = std::move(held_);
    result.text += text.substr(0, i + 1);
    if (!include_) result.text.resize(result.text.size() - stop.size());
    held_.clear();
    return result;
  }
  held_ += text;
  const size_t free = held_.size() - nodes_[node_].depth;
  result.text = held_.substr(0, free);
  held_.erase(0, free);
  return result;
}

std::string StopMatcher::Flush() {
  node_ = 0;
  return std::exchange(held_, {});
}

}  // namespace qwend
