// From the tokens of one request to what its caller gets: text and id deltas, and how it finished.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/tokenizer/text_stream.h"
#include "qwend/v1/inference.pb.h"
#include "server/request_validation.h"

namespace qwend {

// Rules, beyond engine/tokenizer/text_stream.h:
//  - an EOS or stop token that ends the request is among the ids and counted, but not in the text;
//  - text of the first min_tokens tokens is not searched for stop strings;
//  - tokens after the one that completes a stop string are ignored and not counted.
// Not for several threads at once.
class OutputStream {
 public:
  // `tokenizer` may be null: then there is no text. `request` tells which ids end it.
  OutputStream(const Tokenizer* tokenizer, const GenerationRequest& request,
               const std::vector<int32_t>& eos_token_ids, const OutputOptions& options);

  void Append(int32_t token);
  // True once a stop string is complete; the engine need not go on.
  bool stopped() const { return stop_string_.has_value(); }

  // Releases all text that was held back, and tells how the request finished. `reason` is one that
  // comes with a finish message.
  v1::Finish End(CloseReason reason);

  // Whether Take would give anything.
  bool has_delta() const { return !text_.empty() || !ids_.empty(); }
  // Moves what came since the last time into the message.
  void Take(v1::GenerateResponse* message);

  int completion_tokens() const { return completion_tokens_; }

 private:
  bool EndsRequest(int32_t token) const;
  void AddText(std::string text);

  OutputOptions options_;
  int min_tokens_;
  std::vector<int32_t> ending_ids_;
  std::optional<Detokenizer> detokenizer_;  // none: no text is wanted or possible
  StopMatcher matcher_;
  std::string text_;
  std::vector<uint32_t> ids_;
  std::optional<std::string> stop_string_;
  int completion_tokens_ = 0;
  int32_t last_token_ = -1;
};

}  // namespace qwend
