#include "server/output_stream.h"

#include <algorithm>
#include <utility>

namespace qwend {

OutputStream::OutputStream(const Tokenizer* tokenizer, const GenerationRequest& request,
                           const std::vector<int32_t>& eos_token_ids, const OutputOptions& options)
    : options_(options),
      min_tokens_(request.min_tokens),
      ending_ids_(request.stop_token_ids),
      matcher_(options.stop_strings, options.include_stop_string) {
  if (!request.ignore_eos) {
    ending_ids_.insert(ending_ids_.end(), eos_token_ids.begin(), eos_token_ids.end());
  }
  const bool wants_text = !options.omit_text || !options.stop_strings.empty();
  if (tokenizer != nullptr && wants_text) {
    detokenizer_.emplace(*tokenizer, options.skip_special_tokens);
  }
}

bool OutputStream::EndsRequest(int32_t token) const {
  return std::find(ending_ids_.begin(), ending_ids_.end(), token) != ending_ids_.end();
}

void OutputStream::Append(int32_t token) {
  if (stopped()) return;
  ++completion_tokens_;
  last_token_ = token;
  if (!options_.omit_token_ids) ids_.push_back(static_cast<uint32_t>(token));
  if (detokenizer_ && !EndsRequest(token)) AddText(detokenizer_->Append(token));
}

void OutputStream::AddText(std::string text) {
  if (text.empty()) return;
  if (options_.stop_strings.empty() || completion_tokens_ <= min_tokens_) {
    if (!options_.omit_text) text_ += text;
    return;
  }
  StopMatcher::Result result = matcher_.Append(text);
  if (!options_.omit_text) text_ += result.text;
  stop_string_ = std::move(result.stop_string);
}

v1::Finish OutputStream::End(CloseReason reason) {
  if (detokenizer_ && !stopped()) {
    AddText(detokenizer_->Flush());
    if (!stopped()) {
      const std::string held = matcher_.Flush();
      if (!options_.omit_text) text_ += held;
    }
  }
  v1::Finish finish;
  if (stopped()) {
    finish.set_reason(v1::FINISH_REASON_STOP_STRING);
    finish.set_stop_string(*stop_string_);
    return finish;
  }
  switch (reason) {
    case CloseReason::kEos:
      finish.set_reason(v1::FINISH_REASON_EOS);
      break;
    case CloseReason::kStopToken:
      finish.set_reason(v1::FINISH_REASON_STOP_TOKEN);
      finish.set_stop_token_id(static_cast<uint32_t>(last_token_));
      break;
    case CloseReason::kLength:
      finish.set_reason(v1::FINISH_REASON_LENGTH);
      break;
    default:
      finish.set_reason(v1::FINISH_REASON_ABORTED);
      break;
  }
  return finish;
}

void OutputStream::Take(v1::GenerateResponse* message) {
  message->set_text(std::move(text_));
  message->mutable_token_ids()->Assign(ids_.begin(), ids_.end());
  text_.clear();
  ids_.clear();
}

}  // namespace qwend
