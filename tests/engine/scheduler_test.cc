// The scheduler, turn by turn, over a fake model that notices every wrong page, slot and position.
#include "engine/scheduler.h"

#include <map>
#include <random>
#include <stdexcept>

#include "absl/time/clock.h"
#include "fake_executor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "recording_sink.h"

namespace qwend {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Call = FakeExecutor::Call;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);
const std::vector<int32_t> kEos = {7, 8};

// Prompts differ by `salt` and hold no EOS id.
std::vector<int32_t> Prompt(int size, int salt = 0) {
  std::vector<int32_t> prompt;
  for (int i = 0; i < size; ++i) prompt.push_back(10 + (i * 7 + salt * 13) % 80);
  return prompt;
}

GenerationRequest Request(int prompt, int max_tokens, int salt = 0) {
  GenerationRequest request;
  request.id = "r" + std::to_string(salt);
  request.prompt = Prompt(prompt, salt);
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  return request;
}

// A scheduler and all it needs. Checks at its end that nothing was lost or misused.
struct Bench {
  explicit Bench(FakeOptions o = {})
      : options(o), executor(o), pages(o.pages), slots(o.slots), scheduler(Make()) {}
  ~Bench() {
    scheduler.CloseAll(CloseReason::kAborted);
    EXPECT_THAT(executor.violations, IsEmpty());
    EXPECT_EQ(pages.used(), 0);
    EXPECT_EQ(slots.used(), 0);
    for (const auto& sink : sinks) {
      EXPECT_EQ(sink->misuses(), 0);
      EXPECT_TRUE(sink->closed());
    }
  }
  Scheduler Make() {
    return Scheduler(executor, pages, slots, kEos,
                     {.before_close = [this](const std::string& id) { closed.push_back(id); },
                      .on_decode = [this](int rows, absl::Duration) { decoded.push_back(rows); }});
  }
  // Tickets count from 1.
  std::shared_ptr<RecordingSink> Submit(GenerationRequest request) {
    sinks.push_back(std::make_shared<RecordingSink>());
    scheduler.Submit(sinks.size(), std::move(request), sinks.back());
    return sinks.back();
  }
  void Run(absl::Time now = kNow) {
    for (int turns = 0; !scheduler.idle(); ++turns) {
      ASSERT_LT(turns, 100000) << "no progress";
      scheduler.Step(now);
    }
  }
  // Tokens that the fake model gives in place of its own, by their number.
  void Script(std::vector<int32_t> tokens, int prompt) {
    executor.token_function = [=](std::span<const int32_t> history, const SamplingRow&) {
      return tokens.at(history.size() - prompt);
    };
  }

  FakeOptions options;
  FakeExecutor executor;
  KvPages pages;
  StateSlots slots;
  std::vector<std::string> closed;
  std::vector<int> decoded;
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  Scheduler scheduler;
};

TEST(Scheduler, OneRequestGivesItsTokensAndTheirExactEnd) {
  Bench bench;
  const GenerationRequest request = Request(5, 9);
  auto sink = bench.Submit(request);
  EXPECT_EQ(bench.scheduler.counts().waiting, 1);
  bench.Run();
  const FakeAnswer expected = ExpectedAnswer(request, kEos, 100);
  EXPECT_EQ(sink->tokens(), expected.tokens);
  EXPECT_EQ(sink->closed(), CloseReason::kLength);
  EXPECT_THAT(bench.closed, ElementsAre("r0"));
  EXPECT_EQ(bench.scheduler.counts().prompt_tokens, 5u);
  EXPECT_EQ(bench.scheduler.counts().generation_tokens, 9u);
}

struct EndCase {
  const char* name;
  std::vector<int32_t> tokens;  // what the model gives
  int max_tokens;
  std::vector<int32_t> stop_ids;
  bool ignore_eos;
  size_t delivered;
  CloseReason reason;
};

class SchedulerEnd : public testing::TestWithParam<EndCase> {};

TEST_P(SchedulerEnd, IsExact) {
  const EndCase& c = GetParam();
  Bench bench;
  GenerationRequest request = Request(3, c.max_tokens);
  request.stop_token_ids = c.stop_ids;
  request.ignore_eos = c.ignore_eos;
  bench.Script(c.tokens, 3);
  auto sink = bench.Submit(request);
  bench.Run();
  EXPECT_EQ(sink->closed(), c.reason);
  EXPECT_EQ(sink->tokens(), std::vector<int32_t>(c.tokens.begin(), c.tokens.begin() + c.delivered));
}

INSTANTIATE_TEST_SUITE_P(
    All, SchedulerEnd,
    testing::Values(
        EndCase{"OneToken", {20}, 1, {}, false, 1, CloseReason::kLength},
        EndCase{"OneTokenEos", {7}, 1, {}, false, 1, CloseReason::kEos},
        EndCase{"FirstOfTwoEos", {20, 8, 21}, 9, {}, false, 2, CloseReason::kEos},
        EndCase{"EosAsLastAllowed", {20, 7}, 2, {}, false, 2, CloseReason::kEos},
        EndCase{"StopAsLastAllowed", {20, 30}, 2, {30}, false, 2, CloseReason::kStopToken},
        EndCase{"StopId", {20, 21, 30}, 9, {31, 30}, false, 3, CloseReason::kStopToken},
        EndCase{"EosThatIsAStopId", {20, 7}, 9, {7}, false, 2, CloseReason::kEos},
        EndCase{"IgnoredEos", {7, 8, 7, 20}, 4, {}, true, 4, CloseReason::kLength},
        EndCase{"IgnoredEosThatIsAStopId", {8, 7}, 4, {7}, true, 2, CloseReason::kStopToken},
        EndCase{
            "NonFiniteAtPrefill", {kInvalidToken}, 4, {}, false, 0, CloseReason::kNonFiniteLogits},
        EndCase{"NonFiniteInDecode",
                {20, kInvalidToken},
                4,
                {},
                false,
                1,
                CloseReason::kNonFiniteLogits}),
    [](const auto& info) { return info.param.name; });

TEST(Scheduler, MinTokensBansEveryEndUntilThen) {
  Bench bench;
  std::vector<std::vector<int32_t>> banned;
  bench.executor.token_function = [&](std::span<const int32_t>, const SamplingRow& row) {
    banned.emplace_back(row.banned, row.banned + row.num_banned);
    return banned.size() < 4 ? 20 : 7;
  };
  GenerationRequest request = Request(3, 9);
  request.ignore_eos = false;
  request.min_tokens = 2;
  request.stop_token_ids = {40, 8, 40};
  auto sink = bench.Submit(request);
  bench.Run();
  const auto all = ElementsAre(7, 8, 40);
  EXPECT_THAT(banned, ElementsAre(all, all, IsEmpty(), IsEmpty()));
  EXPECT_EQ(sink->closed(), CloseReason::kEos);

  banned.clear();
  request.ignore_eos = true;
  request.max_tokens = 4;
  bench.Submit(request);
  bench.Run();
  const auto stops = ElementsAre(8, 40);
  EXPECT_THAT(banned, ElementsAre(stops, stops, IsEmpty(), IsEmpty()));
}

TEST(Scheduler, SamplingValuesReachTheExecutor) {
  Bench bench;
  std::vector<SamplingRow> rows;
  bench.executor.token_function = [&](std::span<const int32_t>, const SamplingRow& row) {
    rows.push_back(row);
    return 20;
  };
  GenerationRequest request = Request(70, 3);
  request.sampling = {.temperature = 0.5f, .top_p = 0.25f, .min_p = 0.125f, .top_k = 9, .seed = 77};
  bench.Submit(request);
  bench.Run();
  ASSERT_EQ(rows.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(rows[i].temperature, 0.5f);
    EXPECT_EQ(rows[i].top_p, 0.25f);
    EXPECT_EQ(rows[i].min_p, 0.125f);
    EXPECT_EQ(rows[i].top_k, 9);
    EXPECT_EQ(rows[i].seed, 77u);
    EXPECT_EQ(rows[i].position, 70 + i);
  }
}

TEST(Scheduler, ChunksAreAlignedAndAlternateWithDecodeSteps) {
  Bench bench;
  bench.Submit(Request(10, 20, 1));
  bench.scheduler.Step(kNow);
  bench.executor.calls.clear();
  auto second = bench.Submit(Request(150, 5, 2));
  auto third = bench.Submit(Request(64, 5, 3));
  for (int i = 0; i < 4; ++i) bench.scheduler.Step(kNow);
  EXPECT_THAT(
      bench.executor.calls,
      ElementsAre(Call{true, 0, 64}, Call{false, 0, 1}, Call{true, 64, 64}, Call{false, 0, 1},
                  Call{true, 128, 22}, Call{false, 0, 2}, Call{true, 0, 64}, Call{false, 0, 3}));
  EXPECT_TRUE(second->prefilled());
  EXPECT_TRUE(third->prefilled());
  bench.Run();
}

TEST(Scheduler, DecodesInBatchesOfWhatTheExecutorTakes) {
  Bench bench({.slots = 10, .max_rows = 4});
  for (int i = 0; i < 10; ++i) bench.Submit(Request(4, 30, i));
  for (int i = 0; i < 10; ++i) bench.scheduler.Step(kNow);
  bench.decoded.clear();
  bench.scheduler.Step(kNow);
  EXPECT_THAT(bench.decoded, ElementsAre(4, 4, 2));
  bench.Run();
}

TEST(Scheduler, WaitingRequestsGoByPriorityThenArrival) {
  Bench bench({.slots = 1});
  const std::vector<int> priorities = {0, 5, -2147483648, 5, 2147483647, 0};
  for (int i = 0; i < 6; ++i) {
    GenerationRequest request = Request(4, 2, i);
    request.priority = priorities[i];
    bench.Submit(request);
  }
  bench.Run();
  EXPECT_THAT(bench.closed, ElementsAre("r4", "r1", "r3", "r0", "r5", "r2"));
}

TEST(Scheduler, NobodyOvertakesAHeadThatDoesNotFit) {
  Bench bench({.pages = 4});
  bench.Submit(Request(100, 60, 1));               // 3 pages
  auto large = bench.Submit(Request(100, 28, 2));  // 2 pages
  auto small = bench.Submit(Request(5, 5, 3));     // 1 page, would fit
  bench.scheduler.Step(kNow);
  EXPECT_EQ(bench.scheduler.counts().running, 1);
  EXPECT_EQ(bench.scheduler.counts().waiting, 2);
  EXPECT_EQ(bench.scheduler.counts().kv_pages_used, 3);
  EXPECT_TRUE(bench.scheduler.End(1, CloseReason::kCancelled));
  bench.scheduler.Step(kNow);
  EXPECT_TRUE(large->admitted());
  EXPECT_TRUE(small->admitted());
  bench.Run();
}

TEST(Scheduler, APromptAndItsTokensMayFillEveryPage) {
  Bench bench({.pages = 2});
  const GenerationRequest request = Request(100, 28);
  auto sink = bench.Submit(request);
  bench.Run();
  EXPECT_EQ(sink->tokens(), ExpectedAnswer(request, kEos, 100).tokens);
  EXPECT_THROW(bench.scheduler.Submit(99, Request(100, 29), sink), std::invalid_argument);
}

TEST(Scheduler, DeadlineInTheQueueCostsNoStep) {
  Bench bench({.slots = 1});
  bench.Submit(Request(4, 50, 1));
  GenerationRequest late = Request(4, 5, 2);
  late.deadline = kNow + absl::Seconds(1);
  auto sink = bench.Submit(late);
  bench.scheduler.Step(kNow);
  EXPECT_FALSE(sink->closed());
  bench.scheduler.Step(kNow + absl::Seconds(1));
  EXPECT_EQ(sink->closed(), CloseReason::kDeadline);
  EXPECT_FALSE(sink->admitted());
  EXPECT_EQ(bench.scheduler.counts().waiting, 0);

  GenerationRequest dead = Request(4, 5, 3);
  dead.deadline = kNow - absl::Seconds(1);
  bench.scheduler.CloseAll(CloseReason::kAborted);
  bench.executor.calls.clear();
  auto never = bench.Submit(dead);
  bench.Run();
  EXPECT_EQ(never->closed(), CloseReason::kDeadline);
  EXPECT_THAT(bench.executor.calls, IsEmpty());
}

TEST(Scheduler, DeadlineEndsPrefillAndDecode) {
  Bench bench;
  GenerationRequest chunks = Request(200, 5, 1);
  chunks.deadline = kNow + absl::Seconds(1);
  auto prefilling = bench.Submit(chunks);
  GenerationRequest tokens = Request(4, 50, 2);
  tokens.deadline = kNow + absl::Seconds(2);
  bench.scheduler.Step(kNow);
  bench.scheduler.Step(kNow + absl::Seconds(1));
  EXPECT_EQ(prefilling->closed(), CloseReason::kDeadline);
  EXPECT_FALSE(prefilling->prefilled());
  EXPECT_EQ(bench.pages.used(), 0);

  auto decoding = bench.Submit(tokens);
  bench.scheduler.Step(kNow);
  EXPECT_EQ(decoding->tokens().size(), 2u);
  bench.scheduler.Step(kNow + absl::Seconds(2));
  EXPECT_EQ(decoding->closed(), CloseReason::kDeadline);
  EXPECT_EQ(decoding->tokens().size(), 2u);
}

TEST(Scheduler, EndIsLegalInEveryState) {
  Bench bench({.slots = 2});
  auto decoding = bench.Submit(Request(4, 50, 1));
  auto prefilling = bench.Submit(Request(200, 5, 2));
  auto queued = bench.Submit(Request(4, 5, 3));
  bench.scheduler.Step(kNow);
  bench.scheduler.Step(kNow);
  int free_at_close = -1;
  prefilling->on_close = [&](CloseReason) { free_at_close = bench.pages.free(); };
  EXPECT_TRUE(bench.scheduler.End(3, CloseReason::kAborted));
  EXPECT_TRUE(bench.scheduler.End(2, CloseReason::kCancelled));
  EXPECT_EQ(free_at_close, 63);
  EXPECT_TRUE(bench.scheduler.End(1, CloseReason::kStopped));
  EXPECT_EQ(queued->closed(), CloseReason::kAborted);
  EXPECT_EQ(prefilling->closed(), CloseReason::kCancelled);
  EXPECT_EQ(decoding->closed(), CloseReason::kStopped);
  EXPECT_FALSE(queued->admitted());
  for (int ticket : {1, 2, 3, 4}) {
    EXPECT_FALSE(bench.scheduler.End(ticket, CloseReason::kAborted));
  }
  EXPECT_TRUE(bench.scheduler.idle());
}

TEST(Scheduler, NonFiniteLogitsEndOneRequestOnly) {
  Bench bench;
  bench.executor.token_function = [](std::span<const int32_t> history, const SamplingRow& row) {
    if (history.size() == 12 && history[0] == Prompt(1, 2)[0]) return kInvalidToken;
    return FakeToken(history, row, 100);
  };
  std::vector<std::shared_ptr<RecordingSink>> sinks;
  for (int i = 0; i < 4; ++i) sinks.push_back(bench.Submit(Request(10, 8, i)));
  bench.Run();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(sinks[i]->closed(), i == 2 ? CloseReason::kNonFiniteLogits : CloseReason::kLength);
    EXPECT_EQ(sinks[i]->tokens().size(), i == 2 ? 2u : 8u);
  }
}

TEST(Scheduler, AThrowingExecutorLeavesEverythingToCloseAll) {
  for (const bool in_prefill : {true, false}) {
    Bench bench;
    auto last_token = bench.Submit(Request(4, 1, 1));
    auto running = bench.Submit(Request(4, 50, 2));
    auto queued = bench.Submit(Request(64 * 64 - 5, 5, 3));
    int calls = 0;
    if (in_prefill) {
      bench.executor.before_prefill = [&](const PrefillChunk&) {
        if (++calls == 2) throw std::runtime_error("gone");
      };
    } else {
      bench.executor.before_decode = [&](std::span<const DecodeRow>) {
        throw std::runtime_error("gone");
      };
    }
    EXPECT_THROW(while (!bench.scheduler.idle()) bench.scheduler.Step(kNow), std::runtime_error);
    bench.scheduler.CloseAll(CloseReason::kDeviceFault);
    EXPECT_EQ(last_token->closed(), CloseReason::kLength);
    EXPECT_EQ(running->closed(), CloseReason::kDeviceFault);
    EXPECT_EQ(queued->closed(), CloseReason::kDeviceFault);
    EXPECT_TRUE(bench.scheduler.idle());
  }
}

// Requests of all kinds come, run, expire and are ended at random. The fake model checks pages,
// slots and positions; here: every answer is the one that the request gets alone, or a beginning of
// it when somebody ended it.
TEST(Scheduler, RandomSchedulesGiveEveryRequestItsOwnTokens) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % n); };
    Bench bench({.pages = 6 + below(20),
                 .slots = 1 + below(6),
                 .prefill_chunk = 64 * (1 + below(2)),
                 .max_rows = 1 + below(4)});
    std::map<int, GenerationRequest> requests;
    std::map<int, CloseReason> ended;
    absl::Time now = kNow;
    for (int turn = 0; turn < 600 || !bench.scheduler.idle(); ++turn) {
      ASSERT_LT(turn, 20000);
      now += absl::Seconds(1);
      if (turn < 600 && below(4) == 0) {
        GenerationRequest r = Request(1 + below(below(3) == 0 ? 250 : 40), 1, below(1000));
        r.max_tokens = 1 + below(6 * 64 - static_cast<int>(r.prompt.size()));
        r.max_tokens = std::min(r.max_tokens, 1 + below(60));
        r.min_tokens = below(r.max_tokens + 1);
        r.ignore_eos = below(3) == 0;
        if (below(2) == 0) r.stop_token_ids = {below(100), below(100)};
        r.sampling.temperature = below(2) == 0 ? 0.0f : 1.0f;
        r.sampling.seed = random();
        r.priority = below(3);
        if (below(6) == 0) r.deadline = now + absl::Seconds(below(80));
        bench.Submit(r);
        requests[static_cast<int>(bench.sinks.size())] = r;
      }
      if (!requests.empty() && below(12) == 0) {
        const int ticket = 1 + below(static_cast<int>(requests.size()));
        const bool was_live = !bench.sinks[ticket - 1]->closed();
        EXPECT_EQ(bench.scheduler.End(ticket, CloseReason::kCancelled), was_live);
        if (was_live) ended[ticket] = CloseReason::kCancelled;
      }
      bench.scheduler.Step(now);
      ASSERT_THAT(bench.executor.violations, IsEmpty());
    }
    EXPECT_EQ(bench.closed.size(), requests.size());
    int natural = 0;
    for (const auto& [ticket, request] : requests) {
      const RecordingSink& sink = *bench.sinks[ticket - 1];
      const FakeAnswer expected = ExpectedAnswer(request, kEos, 100);
      std::vector<int32_t> tokens = sink.tokens();
      if (sink.closed() == CloseReason::kDeadline || ended.contains(ticket)) {
        ASSERT_LE(tokens.size(), expected.tokens.size());
        EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), expected.tokens.begin()));
        EXPECT_TRUE(!ended.contains(ticket) || sink.closed() == ended[ticket]);
      } else {
        ++natural;
        EXPECT_EQ(tokens, expected.tokens);
        EXPECT_EQ(sink.closed(), expected.reason);
      }
    }
    EXPECT_GT(natural, 20);
  }
}

}  // namespace
}  // namespace qwend
