#include "server/request_validation.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "google/rpc/error_details.pb.h"
#include "kernels/ops.h"
#include "tests/server/fake_engine.h"

namespace qwend {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using testing::FakeEngine;
using ::testing::HasSubstr;
using testing::Ids;
using testing::kEos;
using testing::kFakeVocab;

static_assert(RequestLimits::kMaxBannedIds == SamplingRow::kMaxBanned);

v1::GenerateRequest Request(const std::string& text) {
  v1::GenerateRequest request;
  if (!google::protobuf::TextFormat::ParseFromString(text, &request)) ADD_FAILURE() << text;
  return request;
}

class Validation : public ::testing::Test {
 protected:
  absl::StatusOr<PreparedRequest> Prepare(const v1::GenerateRequest& request) {
    return PrepareRequest(request, ModelView::Of(engine_), RequestLimits());
  }
  absl::StatusOr<PreparedRequest> Prepare(const std::string& text) {
    return Prepare(Request(text));
  }
  // The fields of the BadRequest that a request is refused with.
  std::vector<std::string> FieldsOf(const v1::GenerateRequest& request) {
    const auto prepared = Prepare(request);
    if (prepared.ok()) return {};
    EXPECT_EQ(prepared.status().code(), absl::StatusCode::kInvalidArgument) << prepared.status();
    google::rpc::BadRequest details;
    const auto payload = prepared.status().GetPayload("type.googleapis.com/google.rpc.BadRequest");
    EXPECT_TRUE(payload.has_value());
    EXPECT_TRUE(details.ParseFromString(std::string(payload.value_or(absl::Cord()))));
    std::vector<std::string> fields;
    for (const auto& v : details.field_violations()) {
      EXPECT_FALSE(v.description().empty());
      fields.push_back(v.field());
    }
    return fields;
  }
  std::vector<std::string> FieldsOf(const std::string& text) { return FieldsOf(Request(text)); }
  // Refused with `code`, and the message names `part`.
  void ExpectRefused(const std::string& text, absl::StatusCode code, const std::string& part) {
    const auto prepared = Prepare(text);
    ASSERT_FALSE(prepared.ok()) << text;
    EXPECT_EQ(prepared.status().code(), code) << prepared.status();
    EXPECT_THAT(std::string(prepared.status().message()), HasSubstr(part));
  }

  FakeEngine engine_;
};

TEST_F(Validation, UnsetFieldsTakeTheModelsDefaults) {
  const auto p = Prepare("text: 'abc'");
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->engine.prompt, Ids("abc"));
  EXPECT_EQ(p->engine.sampling.temperature, 0.7f);
  EXPECT_EQ(p->engine.sampling.top_k, 20);
  EXPECT_EQ(p->engine.sampling.top_p, 1.0f);
  EXPECT_EQ(p->engine.max_tokens, 20000 - 3);
  EXPECT_EQ(p->engine.min_tokens, 0);
  EXPECT_FALSE(p->output.omit_text);
  EXPECT_EQ(p->engine.id, "");
}

TEST_F(Validation, EverySetFieldArrives) {
  const auto p = Prepare(R"(request_id: 'r 1' token_ids { ids: [1, 2] } priority: -3
      sampling { temperature: 0 top_p: 0.5 top_k: 0 min_p: 0.1 seed: 9 }
      stopping { max_tokens: 5 min_tokens: 2 stop_strings: ['x', 'yz'] stop_token_ids: 7
                 ignore_eos: true include_stop_string: true }
      output { omit_text: true omit_token_ids: true skip_special_tokens: true })");
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->engine.id, "r 1");
  EXPECT_THAT(p->engine.prompt, ElementsAre(1, 2));
  EXPECT_EQ(p->engine.priority, -3);
  EXPECT_EQ(p->engine.sampling.temperature, 0.0f);
  EXPECT_EQ(p->engine.sampling.top_p, 0.5f);
  EXPECT_EQ(p->engine.sampling.top_k, 0);
  EXPECT_EQ(p->engine.sampling.min_p, 0.1f);
  EXPECT_EQ(p->engine.sampling.seed, 9u);
  EXPECT_EQ(p->engine.max_tokens, 5);
  EXPECT_EQ(p->engine.min_tokens, 2);
  EXPECT_THAT(p->engine.stop_token_ids, ElementsAre(7));
  EXPECT_TRUE(p->engine.ignore_eos);
  EXPECT_THAT(p->output.stop_strings, ElementsAre("x", "yz"));
  EXPECT_TRUE(p->output.include_stop_string && p->output.omit_text && p->output.omit_token_ids &&
              p->output.skip_special_tokens);
}

TEST_F(Validation, RequestsWithoutASeedDiffer) {
  std::set<uint64_t> seeds;
  for (int i = 0; i < 50; ++i) seeds.insert(Prepare("text: 'a'")->engine.sampling.seed);
  EXPECT_EQ(seeds.size(), 50u);
  EXPECT_EQ(Prepare("text: 'a' sampling { seed: 0 }")->engine.sampling.seed, 0u);
}

TEST_F(Validation, SpecialTokensOnlyWithParseSpecial) {
  EXPECT_EQ(Prepare("text: '<eos>'")->engine.prompt, Ids("<eos>"));
  EXPECT_THAT(Prepare("text: '<eos>' parse_special: true")->engine.prompt, ElementsAre(kEos));
}

TEST_F(Validation, AllViolationsAreListed) {
  EXPECT_THAT(
      FieldsOf(R"(request_id: 'a\nb' token_ids { ids: [1, 300, 2, 4000000000] }
        sampling { temperature: -1 top_p: 0 top_k: -1 min_p: 1 repetition_penalty: 0
                   presence_penalty: 3 frequency_penalty: -2.5 }
        stopping { max_tokens: 0 min_tokens: 4 stop_strings: ['ok', ''] stop_token_ids: 300 }
        output { top_logprobs: 21 })"),
      ElementsAre("request_id", "sampling.temperature", "sampling.top_p", "sampling.min_p",
                  "sampling.top_k", "sampling.repetition_penalty", "sampling.presence_penalty",
                  "sampling.frequency_penalty", "stopping.stop_strings[1]",
                  "stopping.stop_token_ids[0]", "output.top_logprobs", "token_ids.ids[1]",
                  "token_ids.ids[3]", "stopping.max_tokens", "stopping.min_tokens"));
}

TEST_F(Validation, NotFiniteNumbersAreRefusedEverywhere) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    v1::GenerateRequest r = Request("text: 'a'");
    v1::Sampling* s = r.mutable_sampling();
    s->set_temperature(bad);
    s->set_top_p(bad);
    s->set_min_p(bad);
    s->set_repetition_penalty(bad);
    s->set_presence_penalty(bad);
    s->set_frequency_penalty(bad);
    s->set_length_penalty(bad);
    (*s->mutable_logit_bias())[3] = bad;
    EXPECT_EQ(FieldsOf(r).size(), 8u);
  }
}

TEST_F(Validation, BoundsOfSampling) {
  EXPECT_TRUE(Prepare("text: 'a' sampling { temperature: 100 top_p: 1 min_p: 0 }").ok());
  EXPECT_THAT(FieldsOf("text: 'a' sampling { temperature: 100.5 }"),
              ElementsAre("sampling.temperature"));
  EXPECT_EQ(Prepare("text: 'a' sampling { temperature: 1e-9 }")->engine.sampling.temperature, 0.0f);
}

TEST_F(Validation, Prompts) {
  EXPECT_THAT(FieldsOf(""), ElementsAre("prompt"));
  EXPECT_THAT(FieldsOf("text: ''"), ElementsAre("text"));
  EXPECT_THAT(FieldsOf("token_ids {}"), ElementsAre("token_ids.ids"));
  EXPECT_THAT(FieldsOf("chat {}"), ElementsAre("chat.messages"));
  EXPECT_TRUE(Prepare("token_ids { ids: 299 }").ok()) << "in the vocabulary, though without text";
}

TEST_F(Validation, LengthsAgainstTheContext) {
  engine_.mutable_model().max_context_tokens = 10;
  EXPECT_EQ(Prepare("text: '1234'")->engine.max_tokens, 6);
  EXPECT_EQ(Prepare("text: '1234' stopping { max_tokens: 6 }")->engine.max_tokens, 6);
  EXPECT_THAT(FieldsOf("text: '1234' stopping { max_tokens: 7 }"),
              ElementsAre("stopping.max_tokens"));
  EXPECT_THAT(FieldsOf("text: '1234' stopping { max_tokens: 4294967295 }"),
              ElementsAre("stopping.max_tokens"));
  EXPECT_TRUE(Prepare("text: '123456789'").ok());
  EXPECT_THAT(FieldsOf("text: '1234567890'"), ElementsAre("text"));
  EXPECT_THAT(FieldsOf("text: '12345678901234'"), ElementsAre("text"));
  EXPECT_THAT(FieldsOf("text: '" + std::string(1000, '1') + "'"), ElementsAre("text"));
  EXPECT_THAT(FieldsOf("text: '1234' stopping { min_tokens: 7 }"),
              ElementsAre("stopping.min_tokens"));
  EXPECT_THAT(FieldsOf("text: '1234' stopping { min_tokens: 3 max_tokens: 2 }"),
              ElementsAre("stopping.min_tokens"));
  EXPECT_TRUE(Prepare("text: '1234' stopping { min_tokens: 2 max_tokens: 2 }").ok());
}

TEST_F(Validation, CountsAndSizes) {
  v1::GenerateRequest r = Request("text: 'a'");
  for (int i = 0; i < 16; ++i) r.mutable_stopping()->add_stop_strings("s");
  for (int i = 0; i < 63; ++i) r.mutable_stopping()->add_stop_token_ids(i);
  r.set_request_id(std::string(128, 'i'));
  EXPECT_TRUE(Prepare(r).ok());
  r.mutable_stopping()->add_stop_strings("s");
  r.mutable_stopping()->add_stop_token_ids(1);  // 64 with the model's EOS id
  r.mutable_stopping()->set_stop_strings(2, std::string(1025, 'x'));
  r.set_request_id(std::string(129, 'i'));
  EXPECT_THAT(FieldsOf(r), ElementsAre("request_id", "stopping.stop_strings",
                                       "stopping.stop_strings[2]", "stopping.stop_token_ids"));
}

TEST_F(Validation, ManyViolationsStayWithinTrailers) {
  v1::GenerateRequest r;
  for (int i = 0; i < 20000; ++i) r.mutable_token_ids()->add_ids(5000);
  const auto p = Prepare(r);
  ASSERT_FALSE(p.ok());
  EXPECT_LT(p.status().message().size(), 1000u);
  google::rpc::BadRequest details;
  const auto payload = p.status().GetPayload("type.googleapis.com/google.rpc.BadRequest");
  ASSERT_TRUE(payload.has_value());
  EXPECT_LT(payload->size(), 5000u);
  ASSERT_TRUE(details.ParseFromString(std::string(*payload)));
  const auto& last = *details.field_violations().rbegin();
  const int listed = details.field_violations_size() - 1;
  EXPECT_THAT(last.description(), HasSubstr(std::to_string(20001 - listed) + " more"))
      << "20000 ids and the prompt's length";
}

TEST_F(Validation, Chats) {
  const auto p = Prepare(R"(chat {
      messages { role: 'system' content: 'S' }
      messages { role: 'user' content: 'U' }
      messages { role: 'assistant' content: 'A' reasoning_content: 'R'
                 tool_calls_json: '[{"function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]' }
      messages { role: 'tool' content: 'T<eos>' }
      tools_json: '{"name": "f"}' enable_thinking: true })");
  ASSERT_TRUE(p.ok()) << p.status();
  const std::string expected_head =
      "system:S|user:U|assistant:A[{\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}}]|tool:T";
  std::vector<int32_t> expected = Ids(expected_head);
  expected.push_back(kEos);  // in a chat special tokens are always recognised
  for (const int32_t id : Ids("|tools[{\"name\":\"f\"}]|think|assistant:")) expected.push_back(id);
  EXPECT_EQ(p->engine.prompt, expected);
}

TEST_F(Validation, ChatViolations) {
  EXPECT_THAT(FieldsOf(R"(chat {
      messages { role: 'developer' content: 'S' }
      messages { role: 'user' content: 'U' tool_calls_json: '[]' reasoning_content: 'x' }
      messages { role: 'assistant' tool_calls_json: '{' }
      messages { role: 'assistant' tool_calls_json: '{}' }
      messages { role: 'assistant' tool_calls_json: '[1, {"name": "f", "arguments": "[]"}]' }
      messages { content: 'no role' }
      tools_json: '[]' tools_json: 'nonsense' })"),
              ElementsAre("chat.messages[0].role", "chat.messages[1].reasoning_content",
                          "chat.messages[1].tool_calls_json", "chat.messages[2].tool_calls_json",
                          "chat.messages[3].tool_calls_json", "chat.messages[4].tool_calls_json[0]",
                          "chat.messages[4].tool_calls_json[1].arguments", "chat.messages[5].role",
                          "chat.tools_json[0]", "chat.tools_json[1]"));
  EXPECT_THAT(FieldsOf("chat { messages { role: 'user' content: 'raise' } }"), ElementsAre("chat"));
  ExpectRefused("chat { messages { role: 'user' content: 'raise' } }",
                absl::StatusCode::kInvalidArgument, "the template does not like this");
}

TEST_F(Validation, DeeplyNestedJsonIsRefused) {
  v1::GenerateRequest r;
  auto* m = r.mutable_chat()->add_messages();
  m->set_role("user");
  r.mutable_chat()->add_tools_json(std::string(100000, '[') + std::string(100000, ']'));
  EXPECT_THAT(FieldsOf(r), ElementsAre("chat.tools_json[0]"));
}

TEST_F(Validation, ModelsWithoutTokenizer) {
  engine_.RemoveTokenizer();
  EXPECT_TRUE(Prepare("token_ids { ids: 1 }").ok());
  using absl::StatusCode;
  ExpectRefused("text: 'a'", StatusCode::kFailedPrecondition, "text");
  ExpectRefused("chat { messages { role: 'user' } }", StatusCode::kFailedPrecondition, "chat");
  ExpectRefused("token_ids { ids: 1 } stopping { stop_strings: 'x' }",
                StatusCode::kFailedPrecondition, "stopping.stop_strings");
  // What is wrong with the request itself comes first.
  EXPECT_THAT(FieldsOf("text: 'a' sampling { top_k: -1 }"), ElementsAre("sampling.top_k"));
}

TEST_F(Validation, ModelsWithoutUsableTemplate) {
  engine_.RemoveTemplate(absl::FailedPreconditionError("line 7: {% break %} is not covered"));
  EXPECT_TRUE(Prepare("text: 'a'").ok());
  ExpectRefused("chat { messages { role: 'user' } }", absl::StatusCode::kFailedPrecondition,
                "line 7");
}

TEST_F(Validation, WhatIsNotBuiltIsSaid) {
  const std::pair<const char*, const char*> cases[] = {
      {"sampling { repetition_penalty: 1.1 }", "sampling.repetition_penalty"},
      {"sampling { presence_penalty: 0.5 }", "sampling.presence_penalty"},
      {"sampling { frequency_penalty: -0.5 }", "sampling.frequency_penalty"},
      {"sampling { logit_bias { key: 1 value: 2 } }", "sampling.logit_bias"},
      {"sampling { allowed_token_ids: 1 }", "sampling.allowed_token_ids"},
      {"sampling { num_outputs: 2 }", "sampling.num_outputs"},
      {"sampling { beam_width: 1 }", "sampling.beam_width"},
      {"sampling { constraint { regex: 'a+' } }", "sampling.constraint"},
      {"output { logprobs: true }", "output.logprobs"},
      {"output { top_logprobs: 3 }", "output.top_logprobs"},
      {"output { prompt_logprobs: true }", "output.prompt_logprobs"},
  };
  for (const auto& [fields, name] : cases) {
    ExpectRefused(std::string("text: 'a' ") + fields, absl::StatusCode::kUnimplemented, name);
  }
  // Neutral values ask for nothing.
  EXPECT_TRUE(Prepare(R"(text: 'a' sampling { repetition_penalty: 1 presence_penalty: 0
      frequency_penalty: 0 num_outputs: 1 beam_width: 0 length_penalty: 1 })")
                  .ok());
  // Bad values win over what is not built.
  EXPECT_THAT(FieldsOf("text: 'a' sampling { num_outputs: 2 allowed_token_ids: 300 }"),
              ElementsAre("sampling.allowed_token_ids[0]"));
  EXPECT_THAT(FieldsOf("text: 'a' sampling { constraint { json_schema: '[' } }"),
              ElementsAre("sampling.constraint.json_schema"));
  EXPECT_THAT(FieldsOf("text: 'a' sampling { constraint { choice {} } }"),
              ElementsAre("sampling.constraint.choice.options"));
  EXPECT_THAT(FieldsOf("text: 'a' sampling { constraint {} }"), ElementsAre("sampling.constraint"));
}

}  // namespace
}  // namespace qwend
