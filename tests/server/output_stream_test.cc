#include "server/output_stream.h"

#include <gtest/gtest.h>

#include "tests/server/fake_engine.h"

namespace qwend {
namespace {

using testing::FakeTokenizer;
using testing::Ids;
using testing::kEos;
using testing::kSpecial;

struct Case {
  GenerationRequest request;
  OutputOptions options;
};

// All tokens, then the end; every delta taken as soon as there is one.
struct Played {
  Played(const Case& setup, const std::vector<int32_t>& tokens, CloseReason reason,
         bool with_tokenizer = true) {
    static const FakeTokenizer tokenizer;
    OutputStream stream(with_tokenizer ? &tokenizer : nullptr, setup.request, {kEos},
                        setup.options);
    const auto take = [&] {
      if (!stream.has_delta()) return;
      v1::GenerateResponse message;
      stream.Take(&message);
      text += message.text();
      deltas.push_back(message.text());
      for (const uint32_t id : message.token_ids()) ids.push_back(static_cast<int32_t>(id));
    };
    for (const int32_t t : tokens) {
      stream.Append(t);
      take();
    }
    finish = stream.End(reason);
    take();
    completion_tokens = stream.completion_tokens();
  }
  std::string text;
  std::vector<std::string> deltas;
  std::vector<int32_t> ids;
  v1::Finish finish;
  int completion_tokens = 0;
};

TEST(OutputStream, EosIsAmongTheIdsButNotInTheText) {
  const Played run({}, Ids("Hi", true), CloseReason::kEos);
  EXPECT_EQ(run.text, "Hi");
  EXPECT_EQ(run.ids, Ids("Hi", true));
  EXPECT_EQ(run.completion_tokens, 3);
  EXPECT_EQ(run.finish.reason(), v1::FINISH_REASON_EOS);
  EXPECT_FALSE(run.finish.has_stop_token_id());
}

TEST(OutputStream, IgnoredEosIsText) {
  Case setup;
  setup.request.ignore_eos = true;
  EXPECT_EQ(Played(setup, {kEos, 'a'}, CloseReason::kLength).text, "<eos>a");
  setup.options.skip_special_tokens = true;
  const Played run(setup, {kEos, kSpecial, 'a'}, CloseReason::kLength);
  EXPECT_EQ(run.text, "a");
  EXPECT_EQ(run.ids.size(), 3u);
}

TEST(OutputStream, StopTokenIsNamed) {
  Case setup;
  setup.request.stop_token_ids = {'!'};
  const Played run(setup, Ids("ab!"), CloseReason::kStopToken);
  EXPECT_EQ(run.text, "ab");
  EXPECT_EQ(run.finish.reason(), v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_EQ(run.finish.stop_token_id(), static_cast<uint32_t>('!'));
  EXPECT_EQ(run.completion_tokens, 3);
}

TEST(OutputStream, OtherReasonsAreExact) {
  EXPECT_EQ(Played({}, Ids("a"), CloseReason::kLength).finish.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(Played({}, Ids("a"), CloseReason::kAborted).finish.reason(), v1::FINISH_REASON_ABORTED);
}

TEST(OutputStream, StopStringAcrossTokens) {
  Case setup;
  setup.options.stop_strings = {"STOP", "never"};
  const Played run(setup, Ids("one STO two STOP three"), CloseReason::kStopped);
  EXPECT_EQ(run.text, "one STO two ");
  EXPECT_EQ(run.ids, Ids("one STO two STOP")) << "tokens after it are ignored";
  EXPECT_EQ(run.completion_tokens, 16);
  EXPECT_EQ(run.finish.reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(run.finish.stop_string(), "STOP");
  setup.options.include_stop_string = true;
  EXPECT_EQ(Played(setup, Ids("one STOP three"), CloseReason::kStopped).text, "one STOP");
}

TEST(OutputStream, StopStringOfTheLastTokenIsNotLength) {
  Case setup;
  setup.options.stop_strings = {"end"};
  const Played run(setup, Ids("the end"), CloseReason::kLength);
  EXPECT_EQ(run.finish.reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(run.text, "the ");
}

TEST(OutputStream, HeldBackHeadIsReleasedAtTheEnd) {
  Case setup;
  setup.options.stop_strings = {"STOP"};
  const Played run(setup, Ids("a STO", true), CloseReason::kEos);
  EXPECT_EQ(run.text, "a STO");
  EXPECT_EQ(run.finish.reason(), v1::FINISH_REASON_EOS);
}

TEST(OutputStream, StopStringsAreNotSoughtWithinMinTokens) {
  Case setup;
  setup.options.stop_strings = {"x"};
  setup.request.min_tokens = 3;
  const Played run(setup, Ids("axbxc"), CloseReason::kStopped);
  EXPECT_EQ(run.text, "axb");
  EXPECT_EQ(run.completion_tokens, 4);
  // Nothing of the first tokens counts as the head of a later match.
  setup.options.stop_strings = {"ab"};
  setup.request.min_tokens = 1;
  EXPECT_EQ(Played(setup, Ids("abab"), CloseReason::kStopped).text, "ab");
}

TEST(OutputStream, PartialCharactersAreHeldBack) {
  const Played run({}, Ids("\xe2\x82\xac!"), CloseReason::kLength);
  EXPECT_EQ(run.text, "\xe2\x82\xac!");
  for (const std::string& d : run.deltas) EXPECT_TRUE(d.empty() || d == "\xe2\x82\xac" || d == "!");
  const Played cut({}, Ids("a\xe2\x82"), CloseReason::kLength);
  EXPECT_EQ(cut.text, "a\xef\xbf\xbd");
}

TEST(OutputStream, OmittedPartsStayOut) {
  Case setup;
  setup.options.omit_text = true;
  setup.options.stop_strings = {"b"};
  const Played no_text(setup, Ids("abc"), CloseReason::kStopped);
  EXPECT_EQ(no_text.text, "");
  EXPECT_EQ(no_text.ids, Ids("ab"));
  EXPECT_EQ(no_text.finish.reason(), v1::FINISH_REASON_STOP_STRING);
  setup = {};
  setup.options.omit_token_ids = true;
  const Played no_ids(setup, Ids("abc"), CloseReason::kLength);
  EXPECT_TRUE(no_ids.ids.empty());
  EXPECT_EQ(no_ids.text, "abc");
  EXPECT_EQ(no_ids.completion_tokens, 3);
}

TEST(OutputStream, ModelsWithoutTokenizerGiveIds) {
  const Played run({}, {1, 299, 3}, CloseReason::kLength, /*with_tokenizer=*/false);
  EXPECT_EQ(run.text, "");
  EXPECT_EQ(run.ids.size(), 3u);
}

}  // namespace
}  // namespace qwend
