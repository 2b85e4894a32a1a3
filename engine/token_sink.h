#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "engine/request.h"

namespace qwend {

// Where a request's tokens go. Engine::Submit keeps a shared_ptr to it until OnClose has returned.
//
// Thread: every call comes from the engine thread, one at a time, in the order OnAdmitted (at most
// once), OnToken (any number, only after OnAdmitted), OnClose (exactly once, last; also without
// OnAdmitted for a request that ended in the queue). Implementations must not block and must not
// call back into the engine from OnClose.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  // The request left the queue: its pages and slot are reserved and its prefill starts.
  // `cached_tokens` of the prompt come from the prefix cache.
  virtual void OnAdmitted(absl::Time now, int cached_tokens) = 0;
  // The prompt is in the cache; the first token follows at once. `prefill` is the time its chunks
  // took.
  virtual void OnPrefilled(absl::Time now, absl::Duration prefill) = 0;
  // The token that ends the request (EOS, stop id) is delivered too, followed by OnClose.
  virtual void OnToken(int32_t token) = 0;
  virtual void OnClose(CloseReason reason) = 0;
};

}  // namespace qwend
