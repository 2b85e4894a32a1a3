// An engine whose tokens a test decides.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/engine.h"
#include "tests/server/fake_model.h"

namespace qwend::testing {

// Keeps the contract of engine/engine.h: sinks are called on one thread of its own, in order, and
// closed exactly once. By default every request is admitted and answered at once with what
// `answer` says, ended by EOS, stop ids, length, End or the deadline as the engine would. With
// `answer` empty a request waits for Admit, Emit and Close.
class FakeEngine : public Engine {
 public:
  using Answer = std::function<std::vector<int32_t>(const GenerationRequest&)>;

  explicit FakeEngine(Answer answer = nullptr, absl::Duration pace = absl::ZeroDuration());
  ~FakeEngine() override;

  // Before it is given to a server.
  void RemoveTokenizer() { tokenizer_.reset(); }
  void RemoveTemplate(absl::Status why) {
    template_.reset();
    template_status_ = std::move(why);
  }
  ModelDescription& mutable_model() { return model_; }
  DeviceDescription& mutable_device() { return device_; }

  // From the test's thread. `id` is the caller's; each runs on the engine's thread, in order.
  void Admit(const std::string& id);
  void Emit(const std::string& id, std::vector<int32_t> tokens);
  void Close(const std::string& id, CloseReason reason);
  void Fault();                       // the device fails
  void RefuseWith(absl::Status why);  // what Submit answers from now on
  void SetStats(EngineStats stats);   // running and waiting stay counted
  void Block(bool blocked);           // the engine's thread does nothing while blocked

  // Waits until the request has been submitted, and returns it.
  GenerationRequest WaitForRequest(const std::string& id);
  // The reasons that End was called with for it so far.
  std::vector<CloseReason> EndsOf(const std::string& id);
  // Waits until no request is alive.
  bool WaitUntilIdle(absl::Duration limit = absl::Seconds(10));
  int submitted();

  // Engine.
  void Start(StepObserver on_step, FaultObserver on_fault) override;
  absl::Status Submit(GenerationRequest request, std::shared_ptr<TokenSink> sink) override;
  absl::Status End(const std::string& id, CloseReason reason) override;
  void AbortAll() override;
  const ModelDescription& model() const override { return model_; }
  const DeviceDescription& device() const override { return device_; }
  const Tokenizer* tokenizer() const override { return tokenizer_.get(); }
  const ChatTemplate* chat_template() const override { return template_.get(); }
  absl::Status chat_template_status() const override { return template_status_; }
  EngineStats Stats() const override;

 private:
  struct Live {
    GenerationRequest request;
    std::shared_ptr<TokenSink> sink;
    bool admitted = false;
    int tokens = 0;
  };

  static std::string CallersId(const std::string& engine_id);
  void Post(std::function<void()> work);
  void Run();
  void Play(const std::string& engine_id);
  void EmitOne(const std::string& engine_id, int32_t token);
  void CloseNow(const std::string& engine_id, CloseReason reason);
  std::string FindId(const std::string& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<TokenSink> SinkOf(const std::string& engine_id);

  const Answer answer_;
  const absl::Duration pace_;
  ModelDescription model_;
  DeviceDescription device_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatTemplate> template_;
  absl::Status template_status_;
  StepObserver on_step_;
  FaultObserver on_fault_;

  mutable absl::Mutex mu_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Live> live_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, GenerationRequest> seen_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::vector<CloseReason>> ends_ ABSL_GUARDED_BY(mu_);
  EngineStats stats_ ABSL_GUARDED_BY(mu_);
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);
  int submitted_ ABSL_GUARDED_BY(mu_) = 0;
  bool blocked_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// The ids of a text's bytes, ended by EOS when asked for.
std::vector<int32_t> Ids(std::string_view text, bool eos = false);

}  // namespace qwend::testing
