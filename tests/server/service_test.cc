// The services as a caller sees them, over a real connection.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/test_server.h"

namespace qwend {
namespace {

using grpc::StatusCode;
using testing::Call;
using ::testing::Contains;
using testing::DetailOf;
using ::testing::ElementsAre;
using testing::FakeEngine;
using ::testing::HasSubstr;
using testing::Ids;
using testing::kEos;
using testing::kLong;
using testing::TestOptions;
using testing::TestServer;
using testing::TextRequest;

constexpr char kAnswer[] = "Hello, w\xc3\xb6rld! One two three.";

std::unique_ptr<FakeEngine> Answering(absl::Duration pace = absl::ZeroDuration()) {
  return std::make_unique<FakeEngine>(
      [](const GenerationRequest&) { return Ids(kAnswer, /*eos=*/true); }, pace);
}

std::unique_ptr<FakeEngine> Manual() { return std::make_unique<FakeEngine>(); }

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return false;
}

TEST(Generate, StreamsInOrderAndEndsOnce) {
  TestServer server(Answering(absl::Microseconds(300)));
  Call call(&server, TextRequest("prompt", "my id"));
  const grpc::Status status = call.Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(call.text(), kAnswer);
  EXPECT_EQ(call.ids(), Ids(kAnswer, true));
  EXPECT_GT(call.messages().size(), 3u);
  for (const auto& m : call.messages()) {
    EXPECT_EQ(m.request_id(), "my id");
    EXPECT_EQ(m.index(), 0u);
    EXPECT_EQ(m.has_finish(), &m == &call.last());
    EXPECT_EQ(m.has_usage(), &m == &call.last());
  }
  EXPECT_EQ(call.last().finish().reason(), v1::FINISH_REASON_EOS);
  const v1::Usage& usage = call.last().usage();
  EXPECT_EQ(usage.prompt_tokens(), 6u);
  EXPECT_EQ(usage.completion_tokens(), call.ids().size());
  EXPECT_GT(usage.time_to_first_token_seconds(), 0);
  EXPECT_LE(usage.queue_seconds(), usage.time_to_first_token_seconds());
  EXPECT_LT(usage.time_to_first_token_seconds(), usage.total_seconds());
}

TEST(Generate, UnaryEqualsStream) {
  TestServer server(Answering());
  std::vector<v1::GenerateRequest> requests(6, TextRequest("prompt"));
  requests[1].mutable_stopping()->set_max_tokens(9);
  requests[2].mutable_stopping()->add_stop_strings("two");
  requests[3].mutable_stopping()->add_stop_token_ids('!');
  requests[4].mutable_output()->set_omit_token_ids(true);
  requests[5].mutable_output()->set_omit_text(true);
  for (const auto& request : requests) {
    Call call(&server, request);
    ASSERT_TRUE(call.Finish().ok());
    grpc::ClientContext context;
    v1::GenerateUnaryResponse whole;
    ASSERT_TRUE(server.inference().GenerateUnary(&context, request, &whole).ok());
    ASSERT_EQ(whole.outputs_size(), 1);
    EXPECT_EQ(whole.outputs(0).text(), call.text());
    EXPECT_THAT(call.ids(), ::testing::ElementsAreArray(whole.outputs(0).token_ids()));
    EXPECT_EQ(whole.outputs(0).finish().SerializeAsString(),
              call.last().finish().SerializeAsString());
    EXPECT_EQ(whole.usage().completion_tokens(), call.last().usage().completion_tokens());
    EXPECT_FALSE(whole.request_id().empty()) << "made up when not given";
    EXPECT_NE(whole.request_id(), call.last().request_id());
  }
}

TEST(Generate, FinishReasonsAreExactAndCounted) {
  TestServer server(Answering());
  const auto reason = [&](const std::function<void(v1::Stopping*)>& change) {
    auto request = TextRequest("p");
    change(request.mutable_stopping());
    Call call(&server, request);
    EXPECT_TRUE(call.Finish().ok());
    return call.last().finish();
  };
  EXPECT_EQ(reason([](auto*) {}).reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(reason([](auto* s) { s->set_max_tokens(1); }).reason(), v1::FINISH_REASON_LENGTH);
  const auto by_string = reason([](auto* s) { s->add_stop_strings("world"); });
  EXPECT_EQ(by_string.reason(), v1::FINISH_REASON_EOS) << "the answer has another spelling";
  EXPECT_EQ(reason([](auto* s) { s->add_stop_strings("One"); }).stop_string(), "One");
  EXPECT_EQ(reason([](auto* s) { s->add_stop_token_ids(','); }).stop_token_id(), ',');
  EXPECT_EQ(server.Counted("eos"), 2);
  EXPECT_EQ(server.Counted("length"), 1);
  EXPECT_EQ(server.Counted("stop_string"), 1);
  EXPECT_EQ(server.Counted("stop_token"), 1);
  const std::string metrics = server.MetricsText();
  EXPECT_THAT(metrics, HasSubstr("qwend_requests_running{model=\"fake\"} 0\n"));
  EXPECT_THAT(metrics, HasSubstr("qwend_requests_waiting{model=\"fake\"} 0\n"));
  EXPECT_THAT(metrics, HasSubstr("qwend_time_to_first_token_seconds_count{model=\"fake\"} 5\n"));
}

TEST(Generate, AllViolationsArriveWithTheStatus) {
  TestServer server(Answering());
  auto request = TextRequest("");
  request.mutable_sampling()->set_temperature(-1);
  request.mutable_stopping()->add_stop_strings("");
  Call call(&server, request);
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(call.messages().empty());
  EXPECT_THAT(status.error_message(), HasSubstr("sampling.temperature"));
  const auto bad = DetailOf<google::rpc::BadRequest>(status);
  ASSERT_EQ(bad.field_violations_size(), 3);
  EXPECT_EQ(bad.field_violations(0).field(), "sampling.temperature");
  EXPECT_EQ(bad.field_violations(1).field(), "stopping.stop_strings[0]");
  EXPECT_EQ(bad.field_violations(2).field(), "text");
  EXPECT_EQ(server.Counted("rejected"), 1);
  EXPECT_EQ(server.engine().submitted(), 0);
}

TEST(Generate, ManyViolationsStillArriveAsInvalidArgument) {
  TestServer server(Answering());
  v1::GenerateRequest request;
  for (int i = 0; i < 5000; ++i) request.mutable_token_ids()->add_ids(1 << 30);
  Call call(&server, request);
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_GT(DetailOf<google::rpc::BadRequest>(status).field_violations_size(), 10);
}

TEST(Generate, FullQueueSaysWhenToRetry) {
  auto engine = Manual();
  engine->RefuseWith(absl::ResourceExhaustedError("the queue is full"));
  TestServer server(std::move(engine));
  Call call(&server, TextRequest("p"));
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_GT(DetailOf<google::rpc::RetryInfo>(status).retry_delay().seconds(), 0);
  const auto& trailers = call.context().GetServerTrailingMetadata();
  EXPECT_EQ(trailers.count("grpc-retry-pushback-ms"), 1u);
}

TEST(Generate, CancelFreesTheSequenceInEveryState) {
  TestServer server(Manual());
  for (int state = 0; state < 3; ++state) {
    const std::string id = absl::StrCat("c", state);
    Call call(&server, TextRequest("p", id));
    server.engine().WaitForRequest(id);
    if (state >= 1) server.engine().Admit(id);
    if (state >= 2) {
      server.engine().Emit(id, Ids("a"));
      v1::GenerateResponse message;
      ASSERT_TRUE(call.Read(&message));
    }
    call.Cancel();
    EXPECT_EQ(call.Finish().error_code(), StatusCode::CANCELLED);
    EXPECT_TRUE(server.engine().WaitUntilIdle());
    EXPECT_THAT(server.engine().EndsOf(id), ElementsAre(CloseReason::kCancelled));
    EXPECT_TRUE(Eventually([&] { return server.Counted("cancelled") == state + 1; }));
  }
}

TEST(Generate, DeadlinesHoldWhileWaitingAndWhileRunning) {
  TestServer server(Manual());
  for (const bool running : {false, true}) {
    const std::string id = running ? "d1" : "d0";
    Call call(&server, TextRequest("p", id), absl::Milliseconds(150));
    server.engine().WaitForRequest(id);
    if (running) server.engine().Admit(id);
    EXPECT_EQ(call.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
    EXPECT_TRUE(server.engine().WaitUntilIdle());
  }
  EXPECT_TRUE(Eventually([&] { return server.Counted("deadline") == 2; }))
      << server.Counted("cancelled") << " counted as cancelled";
  const GenerationRequest seen = server.engine().WaitForRequest("d1");
  EXPECT_LT(seen.deadline, absl::Now() + absl::Seconds(1));
}

TEST(Generate, DuplicateIdsAndTheirReuse) {
  TestServer server(Manual());
  Call first(&server, TextRequest("p", "twin"));
  server.engine().WaitForRequest("twin");
  Call second(&server, TextRequest("p", "twin"));
  EXPECT_EQ(second.Finish().error_code(), StatusCode::ALREADY_EXISTS);
  server.engine().Close("twin", CloseReason::kLength);
  EXPECT_TRUE(first.Finish().ok()) << "the first one is not hurt";
  Call third(&server, TextRequest("p", "twin"));
  EXPECT_TRUE(Eventually([&] { return server.engine().submitted() == 2; }))
      << "free as soon as its stream has ended";
  server.engine().Close("twin", CloseReason::kLength);
  EXPECT_TRUE(third.Finish().ok());
}

TEST(Generate, NaNEndsTheRequestAlone) {
  TestServer server(Manual());
  Call call(&server, TextRequest("p", "n"));
  Call other(&server, TextRequest("p", "o"));
  server.engine().WaitForRequest("n");
  server.engine().WaitForRequest("o");
  server.engine().Admit("n");
  server.engine().Emit("n", Ids("a"));
  server.engine().Close("n", CloseReason::kNonFiniteLogits);
  EXPECT_EQ(call.Finish().error_code(), StatusCode::INTERNAL);
  for (const auto& m : call.messages()) EXPECT_FALSE(m.has_finish());
  EXPECT_EQ(server.Counted("error"), 1);
  server.engine().Close("o", CloseReason::kLength);
  EXPECT_TRUE(other.Finish().ok());
}

TEST(Generate, ReaderThatFallsBehindIsEnded) {
  ServerOptions options = TestOptions();
  options.max_buffered_tokens = 64;
  TestServer server(Manual(), options);
  Call call(&server, TextRequest("p", "slow"));
  server.engine().WaitForRequest("slow");
  server.engine().Admit("slow");
  // Far more than the connection's buffers take.
  for (int i = 0; i < 200; ++i) {
    server.engine().Emit("slow", std::vector<int32_t>(10, kLong));
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_TRUE(server.engine().WaitUntilIdle()) << "the sequence is freed though nobody reads";
  const grpc::Status status = call.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_EQ(server.Counted("error"), 1);
}

TEST(Generate, MessagesOverTheLimitAreRefused) {
  ServerOptions options = TestOptions();
  options.max_message_bytes = 2000;
  TestServer server(Answering(), options);
  Call call(&server, TextRequest(std::string(3000, 'x')));
  EXPECT_EQ(call.Finish().error_code(), StatusCode::RESOURCE_EXHAUSTED);
  Call small(&server, TextRequest("p"));
  EXPECT_TRUE(small.Finish().ok());
}

TEST(Control, Abort) {
  TestServer server(Manual());
  const auto abort = [&](const std::string& id) {
    grpc::ClientContext context;
    v1::AbortRequest request;
    request.set_request_id(id);
    v1::AbortResponse response;
    return server.control().Abort(&context, request, &response).error_code();
  };
  EXPECT_EQ(abort("nobody"), StatusCode::NOT_FOUND);
  EXPECT_EQ(abort(""), StatusCode::INVALID_ARGUMENT);
  for (const bool running : {false, true}) {
    const std::string id = running ? "a1" : "a0";
    Call call(&server, TextRequest("p", id));
    server.engine().WaitForRequest(id);
    if (running) {
      server.engine().Admit(id);
      server.engine().Emit(id, Ids("so far"));
    }
    EXPECT_TRUE(Eventually([&] { return server.engine().Stats().running == running; }));
    EXPECT_EQ(abort(id), StatusCode::OK);
    EXPECT_TRUE(call.Finish().ok());
    EXPECT_EQ(call.last().finish().reason(), v1::FINISH_REASON_ABORTED);
    EXPECT_TRUE(call.last().has_usage());
    EXPECT_EQ(abort(id), StatusCode::NOT_FOUND);
  }
  EXPECT_EQ(server.Counted("aborted"), 2);
}

TEST(Control, ServerInfoAndKernelProfile) {
  auto engine = Manual();
  EngineStats stats;
  stats.kv_pages_used = 5;
  engine->SetStats(stats);
  ServerOptions options = TestOptions();
  options.engine.profile_every = 8;
  TestServer server(std::move(engine), options);
  grpc::ClientContext context;
  v1::ServerInfo info;
  ASSERT_TRUE(server.control().GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_EQ(info.decode_plan(), "explicit");
  EXPECT_EQ(info.max_sequences(), 4u);
  EXPECT_EQ(info.kv_pages_used(), 5u);
  EXPECT_EQ(info.kv_pages_total(), 100u);
  EXPECT_EQ(info.cache_bytes(), 230u);
  EXPECT_EQ(info.workspace_bytes(), 9u);
  EXPECT_THAT(info.captured_batch_sizes(), ElementsAre(1, 2, 4));
  EXPECT_GE(info.uptime_seconds(), 0);

  v1::KernelProfile profile;
  const auto ask = [&](uint32_t batch) {
    grpc::ClientContext c;
    v1::GetKernelProfileRequest request;
    request.set_batch_size(batch);
    return server.control().GetKernelProfile(&c, request, &profile);
  };
  grpc::Status status = ask(0);
  EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("--profile_every"));
  stats.profiles = {{.batch = 1, .steps = 3, .step_seconds = 0.5, .kernels = {}},
                    {.batch = 2,
                     .steps = 9,
                     .step_seconds = 2,
                     .kernels = {{.kernel = "down_proj",
                                  .calls_per_step = 24,
                                  .seconds_per_step = 1,
                                  .bytes_per_step = 5e8}}}};
  server.engine().SetStats(stats);
  ASSERT_TRUE(ask(0).ok());
  EXPECT_EQ(profile.batch_size(), 2u);
  ASSERT_EQ(profile.kernels_size(), 1);
  EXPECT_EQ(profile.kernels(0).calls_per_step(), 24u);
  EXPECT_EQ(profile.kernels(0).share(), 0.5);
  EXPECT_EQ(profile.kernels(0).achieved_bytes_per_second(), 5e8);
  EXPECT_EQ(profile.kernels(0).fraction_of_peak(), 0.5);
  ASSERT_TRUE(ask(1).ok());
  EXPECT_EQ(profile.steps(), 3u);
  status = ask(4);
  EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("1, 2"));
}

TEST(Control, KernelProfileSwitchedOff) {
  ServerOptions options = TestOptions();
  options.engine.profile_every = 0;
  TestServer server(Manual(), options);
  grpc::ClientContext context;
  v1::KernelProfile profile;
  const grpc::Status status = server.control().GetKernelProfile(&context, {}, &profile);
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("--profile_every"));
}

TEST(Inference, TokenizeAndDetokenize) {
  TestServer server(Manual());
  v1::TokenizeRequest request;
  v1::TokenizeResponse response;
  const auto tokenize = [&] {
    grpc::ClientContext context;
    response.Clear();
    return server.inference().Tokenize(&context, request, &response);
  };
  EXPECT_EQ(tokenize().error_code(), StatusCode::INVALID_ARGUMENT);
  request.set_text("\xc3\xb6<eos>");
  request.set_parse_special(true);
  ASSERT_TRUE(tokenize().ok());
  EXPECT_THAT(response.ids(), ElementsAre(0xc3, 0xb6, kEos));
  EXPECT_THAT(response.pieces(), ElementsAre("\xc3", "\xb6", "<eos>"));
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("hi");
  request.set_parse_special(false);
  ASSERT_TRUE(tokenize().ok());
  EXPECT_EQ(response.rendered_text(), "user:hi|assistant:");
  EXPECT_EQ(response.ids_size(), 18);
  message->set_role("robot");
  const grpc::Status status = tokenize();
  EXPECT_EQ(DetailOf<google::rpc::BadRequest>(status).field_violations(0).field(),
            "chat.messages[0].role");

  v1::DetokenizeRequest ids;
  v1::DetokenizeResponse text;
  for (const int32_t id : Ids("ok", true)) ids.add_ids(id);
  grpc::ClientContext a, b, c;
  ASSERT_TRUE(server.inference().Detokenize(&a, ids, &text).ok());
  EXPECT_EQ(text.text(), "ok<eos>");
  ids.set_skip_special_tokens(true);
  ASSERT_TRUE(server.inference().Detokenize(&b, ids, &text).ok());
  EXPECT_EQ(text.text(), "ok");
  ids.add_ids(300);
  EXPECT_EQ(server.inference().Detokenize(&c, ids, &text).error_code(),
            StatusCode::INVALID_ARGUMENT);
}

TEST(Inference, ModelInfo) {
  auto engine = Manual();
  engine->RemoveTemplate(absl::FailedPreconditionError("none"));
  TestServer server(std::move(engine));
  grpc::ClientContext context;
  v1::ModelInfo info;
  ASSERT_TRUE(server.inference().GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.model_id(), "fake");
  EXPECT_EQ(info.parameters(), 1234u);
  EXPECT_EQ(info.vocab_size(), 300u);
  EXPECT_THAT(info.eos_token_ids(), ElementsAre(kEos));
  EXPECT_TRUE(info.has_tokenizer());
  EXPECT_FALSE(info.has_chat_template());
  EXPECT_EQ(info.default_sampling().top_k(), 20);
}

TEST(Inference, TokensAreAskedForEverywhereButAtHealth) {
  const std::string path = ::testing::TempDir() + "/qwend_tokens";
  std::ofstream(path) << "# who may call\nfirst\n second \n";
  ServerOptions options = TestOptions();
  options.auth_token_file = path;
  TestServer server(Answering(), options);  // health is asked without a token
  const auto generate = [&](const char* header) {
    grpc::ClientContext context;
    if (header != nullptr) context.AddMetadata("authorization", header);
    auto reader = server.inference().Generate(&context, TextRequest("p"));
    v1::GenerateResponse message;
    while (reader->Read(&message)) {
    }
    return reader->Finish().error_code();
  };
  EXPECT_EQ(generate(nullptr), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(generate("Basic first"), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(generate("Bearer firs"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(generate("Bearer firstfirst"), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(generate("Bearer "), StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(generate("Bearer first"), StatusCode::OK);
  EXPECT_EQ(generate("bearer second"), StatusCode::OK);
  EXPECT_EQ(server.Counted("rejected"), 5);
  grpc::ClientContext context;
  v1::ServerInfo info;
  EXPECT_EQ(server.control().GetServerInfo(&context, {}, &info).error_code(),
            StatusCode::UNAUTHENTICATED);
}

}  // namespace
}  // namespace qwend
