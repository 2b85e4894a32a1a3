// What validating and answering a request needs to know of a loaded model.
#pragma once

#include "absl/status/status.h"
#include "engine/engine.h"

namespace qwend {

struct ModelView {
  const ModelDescription* description = nullptr;
  const Tokenizer* tokenizer = nullptr;         // null: token ids only
  const ChatTemplate* chat_template = nullptr;  // null: no chats, because of
  absl::Status chat_template_status;            // this

  static ModelView Of(const Engine& engine) {
    return {&engine.model(), engine.tokenizer(), engine.chat_template(),
            engine.chat_template_status()};
  }
};

}  // namespace qwend
