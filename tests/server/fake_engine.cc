#include "tests/server/fake_engine.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace qwend::testing {

std::vector<int32_t> Ids(std::string_view text, bool eos) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  if (eos) ids.push_back(kEos);
  return ids;
}

FakeEngine::FakeEngine(Answer answer, absl::Duration pace)
    : answer_(std::move(answer)),
      pace_(pace),
      tokenizer_(std::make_unique<FakeTokenizer>()),
      template_(std::make_unique<FakeTemplate>()) {
  model_.model_id = "fake";
  model_.architecture = "qwen3";
  model_.parameters = 1234;
  model_.weight_dtype = "bf16";
  model_.vocab_size = kFakeVocab;
  model_.sampleable_tokens = 259;
  model_.max_context_tokens = 20000;
  model_.num_layers = 2;
  model_.num_full_attention_layers = 1;
  model_.eos_token_ids = {kEos};
  model_.default_sampling.temperature = 0.7f;
  model_.default_sampling.top_k = 20;
  device_.backend = "cpu";
  device_.device_name = "fake device";
  device_.decode_plan = "explicit";
  device_.max_sequences = 4;
  device_.kv_page_tokens = 64;
  device_.kv_pages_total = 100;
  device_.batch_buckets = {1, 2, 4};
  device_.weight_bytes = 1000;
  device_.kv_bytes = 200;
  device_.state_bytes = 30;
  device_.activation_bytes = 4;
  device_.workspace_bytes = 5;
  device_.peak_bandwidth = 1e9;
  thread_ = std::thread([this] { Run(); });
}

FakeEngine::~FakeEngine() {
  Block(false);
  AbortAll();
  {
    absl::MutexLock lock(&mu_);
    ending_ = true;
  }
  thread_.join();
}

std::string FakeEngine::CallersId(const std::string& engine_id) {
  return engine_id.substr(0, engine_id.rfind('#'));
}

void FakeEngine::Post(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  work_.push_back(std::move(work));
}

void FakeEngine::Run() {
  for (;;) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return !blocked_ && (!work_.empty() || ending_);
      };
      // The deadlines of waiting requests pass without anybody's word.
      const bool woken = mu_.AwaitWithTimeout(absl::Condition(&ready), absl::Milliseconds(2));
      stats_.heartbeat = absl::Now();
      if (woken && work_.empty()) return;
      if (woken) {
        work = std::move(work_.front());
        work_.pop_front();
      } else if (!blocked_) {
        for (const auto& [id, live] : live_) {
          if (live.request.deadline <= absl::Now()) {
            work = [this, id = id] { CloseNow(id, CloseReason::kDeadline); };
          }
        }
      }
    }
    if (work) work();
  }
}

std::string FakeEngine::FindId(const std::string& id) {
  for (const auto& [engine_id, live] : live_) {
    if (CallersId(engine_id) == id) return engine_id;
  }
  return "";
}

std::shared_ptr<TokenSink> FakeEngine::SinkOf(const std::string& engine_id) {
  absl::MutexLock lock(&mu_);
  const auto it = live_.find(engine_id);
  return it == live_.end() ? nullptr : it->second.sink;
}

void FakeEngine::Admit(const std::string& id) {
  Post([this, id] {
    std::shared_ptr<TokenSink> sink;
    {
      absl::MutexLock lock(&mu_);
      const auto it = live_.find(FindId(id));
      if (it == live_.end()) return;
      it->second.admitted = true;
      sink = it->second.sink;
      stats_.prompt_tokens += it->second.request.prompt.size();
    }
    sink->OnAdmitted(absl::Now(), 0);
    sink->OnPrefilled(absl::Now(), absl::Milliseconds(1));
  });
}

void FakeEngine::Emit(const std::string& id, std::vector<int32_t> tokens) {
  Post([this, id, tokens = std::move(tokens)] {
    std::string engine_id;
    {
      absl::MutexLock lock(&mu_);
      engine_id = FindId(id);
    }
    for (const int32_t t : tokens) EmitOne(engine_id, t);
  });
}

void FakeEngine::Close(const std::string& id, CloseReason reason) {
  Post([this, id, reason] {
    std::string engine_id;
    {
      absl::MutexLock lock(&mu_);
      engine_id = FindId(id);
    }
    CloseNow(engine_id, reason);
  });
}

void FakeEngine::EmitOne(const std::string& engine_id, int32_t token) {
  const std::shared_ptr<TokenSink> sink = SinkOf(engine_id);
  if (sink == nullptr) return;
  if (on_step_) on_step_(1, absl::Milliseconds(1));
  {
    absl::MutexLock lock(&mu_);
    ++stats_.generation_tokens;
    ++live_.at(engine_id).tokens;
  }
  sink->OnToken(token);
}

void FakeEngine::CloseNow(const std::string& engine_id, CloseReason reason) {
  std::shared_ptr<TokenSink> sink;
  {
    absl::MutexLock lock(&mu_);
    const auto it = live_.find(engine_id);
    if (it == live_.end()) return;
    sink = it->second.sink;
    live_.erase(it);
  }
  sink->OnClose(reason);
}

void FakeEngine::Play(const std::string& engine_id) {
  GenerationRequest request;
  {
    absl::MutexLock lock(&mu_);
    const auto it = live_.find(engine_id);
    if (it == live_.end()) return;
    request = it->second.request;
  }
  const std::vector<int32_t> tokens = answer_(request);
  int count = 0;
  for (const int32_t t : tokens) {
    // Word of End comes between two tokens, as in the engine.
    for (;;) {
      std::function<void()> work;
      {
        absl::MutexLock lock(&mu_);
        if (work_.empty()) break;
        work = std::move(work_.front());
        work_.pop_front();
      }
      work();
    }
    EmitOne(engine_id, t);
    const auto& stops = request.stop_token_ids;
    if (t == kEos && !request.ignore_eos) return CloseNow(engine_id, CloseReason::kEos);
    if (std::find(stops.begin(), stops.end(), t) != stops.end()) {
      return CloseNow(engine_id, CloseReason::kStopToken);
    }
    if (++count == request.max_tokens) return CloseNow(engine_id, CloseReason::kLength);
    if (request.deadline <= absl::Now()) return CloseNow(engine_id, CloseReason::kDeadline);
    absl::SleepFor(pace_);
  }
  CloseNow(engine_id, CloseReason::kLength);
}

void FakeEngine::Fault() {
  Post([this] {
    std::vector<std::string> ids;
    {
      absl::MutexLock lock(&mu_);
      stats_.failed = true;
      refusal_ = absl::UnavailableError("the engine has failed");
      for (const auto& [id, live] : live_) ids.push_back(id);
    }
    for (const std::string& id : ids) CloseNow(id, CloseReason::kDeviceFault);
    if (on_fault_) on_fault_(absl::InternalError("a made-up fault"));
  });
}

void FakeEngine::RefuseWith(absl::Status why) {
  absl::MutexLock lock(&mu_);
  refusal_ = std::move(why);
}

void FakeEngine::SetStats(EngineStats stats) {
  absl::MutexLock lock(&mu_);
  stats_ = std::move(stats);
}

void FakeEngine::Block(bool blocked) {
  absl::MutexLock lock(&mu_);
  blocked_ = blocked;
}

GenerationRequest FakeEngine::WaitForRequest(const std::string& id) {
  absl::MutexLock lock(&mu_);
  const auto seen = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return seen_.count(id) > 0; };
  mu_.AwaitWithTimeout(absl::Condition(&seen), absl::Seconds(10));
  return seen_[id];
}

std::vector<CloseReason> FakeEngine::EndsOf(const std::string& id) {
  absl::MutexLock lock(&mu_);
  return ends_[id];
}

bool FakeEngine::WaitUntilIdle(absl::Duration limit) {
  absl::MutexLock lock(&mu_);
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return live_.empty(); };
  return mu_.AwaitWithTimeout(absl::Condition(&idle), limit);
}

int FakeEngine::submitted() {
  absl::MutexLock lock(&mu_);
  return submitted_;
}

void FakeEngine::Start(StepObserver on_step, FaultObserver on_fault) {
  on_step_ = std::move(on_step);
  on_fault_ = std::move(on_fault);
}

absl::Status FakeEngine::Submit(GenerationRequest request, std::shared_ptr<TokenSink> sink) {
  absl::MutexLock lock(&mu_);
  if (!refusal_.ok()) return refusal_;
  const std::string id = request.id;
  if (live_.count(id) > 0) return absl::AlreadyExistsError(id);
  ++submitted_;
  seen_[CallersId(id)] = request;
  live_[id] = Live{std::move(request), std::move(sink)};
  if (answer_) {
    work_.push_back([this, id] {
      if (auto live_sink = SinkOf(id)) {
        {
          absl::MutexLock inner(&mu_);
          live_.at(id).admitted = true;
          stats_.prompt_tokens += live_.at(id).request.prompt.size();
        }
        live_sink->OnAdmitted(absl::Now(), 0);
        live_sink->OnPrefilled(absl::Now(), absl::Milliseconds(1));
        Play(id);
      }
    });
  }
  return absl::OkStatus();
}

absl::Status FakeEngine::End(const std::string& id, CloseReason reason) {
  absl::MutexLock lock(&mu_);
  ends_[CallersId(id)].push_back(reason);
  if (live_.count(id) == 0) return absl::NotFoundError(id);
  work_.push_front([this, id, reason] { CloseNow(id, reason); });
  return absl::OkStatus();
}

void FakeEngine::AbortAll() {
  absl::MutexLock lock(&mu_);
  for (const auto& [id, live] : live_) {
    work_.push_front([this, id = id] { CloseNow(id, CloseReason::kAborted); });
  }
}

EngineStats FakeEngine::Stats() const {
  absl::MutexLock lock(&mu_);
  EngineStats stats = stats_;
  stats.running = 0;
  stats.waiting = 0;
  for (const auto& [id, live] : live_) ++(live.admitted ? stats.running : stats.waiting);
  return stats;
}

}  // namespace qwend::testing
