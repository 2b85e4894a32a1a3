// The device one step ahead: the caller gets the tokens of plain decoding, whoever joins, leaves or
// takes a used slot.
#include "engine/decode_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "tests/engine/test_model.h"

namespace qwend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kHybrid = "tiny-qwen35";  // has recurrent state, which must never move twice

SamplingRow Seeded(uint64_t seed, int position) {
  SamplingRow sampling;
  sampling.temperature = seed % 3 == 0 ? 0.0f : 1.3f;
  sampling.seed = seed;
  sampling.position = position;
  return sampling;
}

// One request: its prompt, and what a runner of its own, without anything ahead, answers.
struct Request {
  uint64_t seed = 0;
  std::vector<int32_t> prompt;
  std::vector<int32_t> want;
};

std::vector<Request> MakeRequests(int count) {
  std::mt19937 random(7);
  TestModel plain(GoldenDir(kHybrid));
  std::vector<Request> requests;
  for (int r = 0; r < count; ++r) {
    Request request{.seed = static_cast<uint64_t>(r), .prompt = {}, .want = {}};
    for (int i = 0, n = 1 + static_cast<int>(random() % 130); i < n; ++i)
      request.prompt.push_back(static_cast<int32_t>(random() % 500));
    const TestSequence sequence = plain.Sequence(0);
    int position = static_cast<int>(request.prompt.size());
    request.want = {plain.Prefill(sequence, request.prompt, Seeded(request.seed, position))};
    for (int i = 0, n = static_cast<int>(random() % 20); i < n; ++i, ++position) {
      const DecodeRow row{.sequence = sequence.view(),
                          .token = request.want.back(),
                          .position = position,
                          .sampling = Seeded(request.seed, position + 1)};
      request.want.push_back(plain.runner().Decode({&row, 1})[0]);
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

// As the scheduler runs them: whoever waits takes a free slot, prompts are prefilled between steps,
// and all that decode do so together.
TEST(DecodeAhead, WhoeverJoinsOrLeavesGetsItsOwnTokens) {
  const std::vector<Request> requests = MakeRequests(24);
  constexpr int kSlots = 4;
  TestModel model(GoldenDir(kHybrid),
                  {.max_sequences = kSlots, .profile_every = 5, .decode_ahead = true});
  struct Running {
    const Request* request;
    TestSequence sequence;
    std::vector<int32_t> tokens;
  };
  std::mt19937 random(11);
  std::vector<int> free_slots = {0, 1, 2, 3};
  std::vector<Running> running;
  size_t next = 0;
  while (next < requests.size() || !running.empty()) {
    if (next < requests.size() && !free_slots.empty() && random() % 2 == 0) {
      const Request& request = requests[next++];
      Running r{.request = &request, .sequence = model.Sequence(free_slots.back()), .tokens = {}};
      free_slots.pop_back();
      const int position = static_cast<int>(request.prompt.size());
      r.tokens = {model.Prefill(r.sequence, request.prompt, Seeded(request.seed, position))};
      running.push_back(std::move(r));
      if (random() % 3 == 0) std::shuffle(running.begin(), running.end(), random);
    }
    std::erase_if(running, [&](const Running& r) {
      if (r.tokens.size() < r.request->want.size()) return false;
      EXPECT_EQ(r.tokens, r.request->want) << "seed " << r.request->seed;
      free_slots.push_back(r.sequence.slot);
      return true;
    });
    if (running.empty()) continue;
    std::vector<DecodeRow> rows;
    for (const Running& r : running) {
      const int position = static_cast<int>(r.request->prompt.size() + r.tokens.size()) - 1;
      rows.push_back({.sequence = r.sequence.view(),
                      .token = r.tokens.back(),
                      .position = position,
                      .sampling = Seeded(r.request->seed, position + 1)});
    }
    const std::span<const int32_t> tokens = model.runner().Decode(rows);
    for (size_t i = 0; i < running.size(); ++i) running[i].tokens.push_back(tokens[i]);
  }
}

// Samples token + 1, and notes what it was given.
class CountingQueue : public StepQueue {
 public:
  void Launch(std::span<const DecodeRow> rows, bool tokens_on_device) override {
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < rows.size(); ++i)
      tokens.push_back((tokens_on_device ? last_[i] : rows[i].token) + 1);
    log += (tokens_on_device ? "device " : "host ") + std::to_string(rows.size()) + "; ";
    last_ = tokens;
    queued_.push_back(tokens);
    EXPECT_LE(queued_.size(), 2u);
  }
  std::vector<int32_t> Collect() override {
    EXPECT_FALSE(queued_.empty()) << "nothing was launched";
    std::vector<int32_t> tokens = queued_.front();
    queued_.pop_front();
    log += "read; ";
    return tokens;
  }
  std::string log;

 private:
  std::vector<int32_t> last_;
  std::deque<std::vector<int32_t>> queued_;
};

class DecodeAheadOrder : public testing::Test {
 protected:
  DecodeRow Row(int slot, int position, int32_t token) const {
    DecodeRow row;
    row.sequence = {.pages = pages_, .state_slot = slot};
    row.token = token;
    row.position = position;
    return row;
  }
  std::vector<int32_t> Decode(std::vector<DecodeRow> rows) {
    queue_.log.clear();
    return ahead_.Decode(rows);
  }

  std::vector<int32_t> pages_ = {0, 1};
  CountingQueue queue_;
  DecodeAhead ahead_{queue_, 100};
};

TEST_F(DecodeAheadOrder, TheNextStepIsQueuedBeforeThisOneIsRead) {
  EXPECT_THAT(Decode({Row(0, 5, 10), Row(1, 9, 20)}), ElementsAre(11, 21));
  EXPECT_EQ(queue_.log, "host 2; read; host 2; ");
  EXPECT_THAT(Decode({Row(0, 6, 11), Row(1, 10, 21)}), ElementsAre(12, 22));
  EXPECT_EQ(queue_.log, "device 2; read; ");
  EXPECT_THAT(Decode({Row(0, 7, 12), Row(1, 11, 22)}), ElementsAre(13, 23));
  EXPECT_EQ(queue_.log, "device 2; read; ");
}

TEST_F(DecodeAheadOrder, ALateRowIsDecodedBesideWhatIsReady) {
  Decode({Row(0, 5, 10)});
  EXPECT_THAT(Decode({Row(1, 3, 50), Row(0, 6, 11)}), ElementsAre(51, 12));
  EXPECT_EQ(queue_.log, "read; host 1; read; host 2; ");
  EXPECT_THAT(Decode({Row(0, 7, 12)}), ElementsAre(13));  // the other one has ended
  EXPECT_EQ(queue_.log, "read; host 1; ");
}

TEST_F(DecodeAheadOrder, ATokenThatIsReadyWaitsForARowThatSitsOut) {
  Decode({Row(0, 5, 10), Row(1, 9, 20)});
  EXPECT_THAT(Decode({Row(0, 6, 11)}), ElementsAre(12));
  EXPECT_THAT(Decode({Row(1, 10, 21)}), ElementsAre(22));
  EXPECT_EQ(queue_.log, "read; host 1; ");  // row 1 was not computed again
}

TEST_F(DecodeAheadOrder, AfterAPromptTheTokensComeFromTheHost) {
  Decode({Row(0, 5, 10)});
  ahead_.BeforePrefill(1, true);
  EXPECT_THAT(Decode({Row(0, 6, 11)}), ElementsAre(12));
  EXPECT_EQ(queue_.log, "read; ");  // nothing ahead: a late row is likely
  EXPECT_THAT(Decode({Row(0, 7, 12), Row(1, 3, 50)}), ElementsAre(13, 51));
  EXPECT_EQ(queue_.log, "host 2; read; host 2; ");  // both in one step
}

TEST_F(DecodeAheadOrder, ASlotThatStartsAPromptForgets) {
  Decode({Row(0, 5, 10)});
  ahead_.BeforePrefill(0, true);
  EXPECT_THAT(Decode({Row(0, 6, 70)}), ElementsAre(71));
  EXPECT_EQ(queue_.log, "read; host 1; read; ");
}

TEST_F(DecodeAheadOrder, OneRowThatIsNotKnownHoldsAllBack) {
  DecodeRow banned = Row(1, 9, 20);
  banned.sampling.num_banned = 1;
  EXPECT_THAT(Decode({Row(0, 5, 10), banned}), ElementsAre(11, 21));
  EXPECT_EQ(queue_.log, "host 2; read; ");  // one pass over the weights, not two
  EXPECT_THAT(Decode({Row(0, 6, 11), Row(1, 10, 21)}), ElementsAre(12, 22));
  EXPECT_EQ(queue_.log, "host 2; read; host 2; ");
  EXPECT_THAT(Decode({Row(0, 7, 12), Row(1, 127, 22)}), ElementsAre(13, 23));
  EXPECT_EQ(queue_.log, "read; host 1; read; host 1; ");  // row 1 is at its end, row 0 goes on
}

TEST_F(DecodeAheadOrder, NothingIsQueuedBeyondWhatIsKnown) {
  DecodeRow banned = Row(0, 5, 10);
  banned.sampling.num_banned = 1;
  Decode({banned});
  EXPECT_EQ(queue_.log, "host 1; read; ");  // the next step may ban other ids
  DecodeRow kept = Row(0, 6, 11);
  kept.sampling.keep_logits = 1;
  Decode({kept});
  EXPECT_EQ(queue_.log, "host 1; read; ");  // its logits are wanted
  Decode({Row(0, 99, 11)});
  EXPECT_EQ(queue_.log, "host 1; read; ");  // the context ends
  pages_ = {0};
  Decode({Row(0, 63, 11)});
  EXPECT_EQ(queue_.log, "host 1; read; ");  // no page holds position 64
  Decode({Row(0, 60, -2)});
  EXPECT_EQ(queue_.log, "host 1; read; ");  // sampled -1: the sequence ends
}

TEST_F(DecodeAheadOrder, AnotherTokenThanTheSampledOneIsRefused) {
  Decode({Row(0, 5, 10)});
  try {
    Decode({Row(0, 6, 99)});
    FAIL() << "the step had been queued with token 11";
  } catch (const std::invalid_argument& e) {
    EXPECT_THAT(e.what(), HasSubstr("slot 0 continues with token 99"));
  }
}

}  // namespace
}  // namespace qwend
