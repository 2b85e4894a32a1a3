// qwend-client bench: a load generator. N streams at a time, one thread and one connection each.

#include <algorithm>
#include <atomic>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/answer.h"
#include "client/bench_stats.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"
#include "client/interrupt.h"

namespace qwend::client {
namespace {

std::vector<std::string> BuiltInPrompts() {
  return {"What is the capital of France?", "Tell me a story about a fox and a lantern.",
          "List the months of the year.",   "What is 17 plus 25?",
          "Write a short story.",           "Which country has Roseau as its capital?",
          "Tell me three stories.",         "Sort these words: desert, eagle, ocean, olive."};
}

// The calls in flight, so that Ctrl-C can end them.
class LiveCalls {
 public:
  void Add(grpc::ClientContext* context) {
    absl::MutexLock lock(&mutex_);
    live_.insert(context);
    if (cancelled_) context->TryCancel();
  }
  void Remove(grpc::ClientContext* context) {
    absl::MutexLock lock(&mutex_);
    live_.erase(context);
  }
  void CancelAll() {
    absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    for (grpc::ClientContext* context : live_) context->TryCancel();
  }

 private:
  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<grpc::ClientContext*> live_ ABSL_GUARDED_BY(mutex_);
};

RequestTiming TimeOne(v1::Inference::Stub& stub, const Options& options,
                      const v1::GenerateRequest& request, LiveCalls* live) {
  grpc::ClientContext context;
  Prepare(options.connection, &context);
  live->Add(&context);
  RequestTiming timing;
  const absl::Time start = absl::Now();
  absl::Time last = start;
  auto stream = stub.Generate(&context, request);
  v1::GenerateResponse message;
  while (stream->Read(&message)) {
    const absl::Time now = absl::Now();
    if (message.token_ids().empty()) continue;
    AddTokens(&timing, absl::ToDoubleSeconds(now - last), message.token_ids_size());
    last = now;
  }
  const grpc::Status status = stream->Finish();
  live->Remove(&context);
  timing.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  if (!status.ok()) timing.error = CodeName(status.error_code());
  return timing;
}

v1::GenerateRequest RequestFor(const GenerationOptions& g, const std::string& prompt) {
  v1::GenerateRequest request;
  FillRequest(g, &request);
  if (g.raw) {
    request.set_text(prompt);
    return request;
  }
  if (!g.system.empty()) {
    v1::Message* system = request.mutable_chat()->add_messages();
    system->set_role("system");
    system->set_content(g.system);
  }
  v1::Message* user = request.mutable_chat()->add_messages();
  user->set_role("user");
  user->set_content(prompt);
  return request;
}

// Runs `count` requests on the channels, one thread each, and returns what each request took.
std::vector<RequestTiming> RunLoad(const std::vector<std::shared_ptr<grpc::Channel>>& channels,
                                   const Options& options,
                                   const std::vector<v1::GenerateRequest>& requests, int count,
                                   LiveCalls* live, const std::atomic<bool>& stop) {
  std::atomic<int> next{0};
  std::vector<RequestTiming> timings(count);
  std::vector<char> ran(count, 0);
  std::vector<std::thread> threads;
  for (const auto& channel : channels) {
    threads.emplace_back([&, channel] {
      auto stub = v1::Inference::NewStub(channel);
      for (int i; (i = next.fetch_add(1)) < count && !stop;) {
        timings[i] = TimeOne(*stub, options, requests[i % requests.size()], live);
        ran[i] = 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<RequestTiming> done;
  for (int i = 0; i < count; ++i) {
    if (ran[i]) done.push_back(std::move(timings[i]));
  }
  return done;
}

}  // namespace

int Bench(const Options& options) {
  if (!options.arguments.empty() || !options.generation.request_id.empty()) {
    PrintError("bench takes no prompt and no --request_id; --prompts FILE has one prompt a line");
    return kUsage;
  }
  std::vector<v1::GenerateRequest> requests;
  if (options.generation.prompt) {
    v1::GenerateRequest request;
    FillRequest(options.generation, &request);
    const auto& ids = *options.generation.prompt;
    request.mutable_token_ids()->mutable_ids()->Assign(ids.begin(), ids.end());
    requests.push_back(std::move(request));
  } else {
    std::vector<std::string> prompts = BuiltInPrompts();
    if (!options.bench.prompts.empty()) {
      prompts.clear();
      std::ifstream in(options.bench.prompts);
      for (std::string line; std::getline(in, line);) {
        if (!line.empty()) prompts.push_back(line);
      }
      if (prompts.empty()) {
        PrintError(absl::StrCat("--prompts ", options.bench.prompts, ": no prompt in it"));
        return kUsage;
      }
    }
    for (const std::string& p : prompts) requests.push_back(RequestFor(options.generation, p));
  }
  auto first = Connect(options.connection);
  if (first == nullptr) return kFailed;
  const int streams = std::min(options.bench.concurrency, options.bench.requests);
  std::vector<std::shared_ptr<grpc::Channel>> channels = {first};
  while (static_cast<int>(channels.size()) < streams) {
    channels.push_back(*MakeChannel(options.connection));
  }

  LiveCalls live;
  std::atomic<bool> stop{false};
  InterruptScope interrupt([&] {
    stop = true;
    live.CancelAll();
  });
  if (options.bench.warmup > 0) {
    RunLoad(channels, options, requests, options.bench.warmup, &live, stop);
  }
  const absl::Time start = absl::Now();
  const auto timings = RunLoad(channels, options, requests, options.bench.requests, &live, stop);
  const BenchReport report =
      Summarize(streams, absl::ToDoubleSeconds(absl::Now() - start), timings);
  if (!Write(options.json ? ReportJson(report) : ReportText(report))) return kClosedPipe;
  if (interrupt.interrupted()) return kInterrupted;
  return report.errors.empty() ? kOk : kFailed;
}

}  // namespace qwend::client
