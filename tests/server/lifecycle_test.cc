#include "server/lifecycle.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/delivery.h"
#include "server/signals.h"
#include "server/watchdog.h"
#include "tests/server/http_get.h"
#include "tests/server/test_server.h"

namespace qwend {
namespace {

using grpc::StatusCode;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using testing::Call;
using testing::Connect;
using testing::DetailOf;
using testing::FakeEngine;
using ::testing::HasSubstr;
using testing::Ids;
using testing::kLong;
using testing::TestOptions;
using testing::TestServer;
using testing::TextRequest;

std::unique_ptr<FakeEngine> Manual() { return std::make_unique<FakeEngine>(); }

TEST(Lifecycle, DrainLetsRunningStreamsFinish) {
  TestServer server(Manual());
  Call running(&server, TextRequest("p", "r"));
  server.engine().WaitForRequest("r");
  server.engine().Admit("r");
  server.RequestStop();
  EXPECT_EQ(server.Health(), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(server.Health("qwend.v1.Inference"), HealthCheckResponse::NOT_SERVING);
  Call refused(&server, TextRequest("p"));
  const grpc::Status status = refused.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_GT(DetailOf<google::rpc::RetryInfo>(status).retry_delay().seconds(), 0);
  grpc::ClientContext context;
  v1::ServerInfo info;
  EXPECT_TRUE(server.control().GetServerInfo(&context, {}, &info).ok()) << "questions may be asked";
  server.engine().Emit("r", Ids("to the end", true));
  server.engine().Close("r", CloseReason::kEos);
  EXPECT_TRUE(running.Finish().ok());
  EXPECT_EQ(running.text(), "to the end");
  EXPECT_EQ(server.Wait().exit_code, 0);
}

TEST(Lifecycle, DrainLimitAbortsWhatStillRuns) {
  ServerOptions options = TestOptions();
  options.drain = absl::Milliseconds(200);
  TestServer server(Manual(), options);
  Call running(&server, TextRequest("p", "r"));
  Call waiting(&server, TextRequest("p", "w"));
  server.engine().WaitForRequest("r");
  server.engine().WaitForRequest("w");
  server.engine().Admit("r");
  server.engine().Emit("r", Ids("half"));
  const absl::Time start = absl::Now();
  server.RequestStop();
  for (Call* call : {&running, &waiting}) {
    EXPECT_TRUE(call->Finish().ok());
    EXPECT_EQ(call->last().finish().reason(), v1::FINISH_REASON_ABORTED);
  }
  EXPECT_EQ(running.text(), "half");
  EXPECT_EQ(server.Wait().exit_code, 0);
  EXPECT_GE(absl::Now() - start, options.drain);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST(Lifecycle, StreamThatNobodyReadsHoldsTheDrainUntilItsLimitOnly) {
  ServerOptions options = TestOptions();
  options.drain = absl::Milliseconds(300);
  options.max_buffered_tokens = 20000;  // nothing is ended for being behind
  auto engine = std::make_unique<FakeEngine>(
      [](const GenerationRequest&) { return std::vector<int32_t>(2000, kLong); });
  TestServer server(std::move(engine), options);
  Call unread(&server, TextRequest("p", "r"));
  server.engine().WaitForRequest("r");
  ASSERT_TRUE(server.engine().WaitUntilIdle(absl::Seconds(20)));
  const absl::Time start = absl::Now();
  server.RequestStop();
  EXPECT_EQ(server.Wait().exit_code, 0);
  EXPECT_GE(absl::Now() - start, options.drain);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST(Lifecycle, SecondStopEndsAtOnce) {
  ServerOptions options = TestOptions();
  options.drain = absl::Seconds(600);
  TestServer server(Manual(), options);
  Call running(&server, TextRequest("p", "r"), absl::Seconds(60));
  server.engine().WaitForRequest("r");
  const absl::Time start = absl::Now();
  server.RequestStop();
  absl::SleepFor(absl::Milliseconds(50));
  server.RequestStop();
  EXPECT_TRUE(running.Finish().ok());
  EXPECT_EQ(running.last().finish().reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_EQ(server.Wait().exit_code, 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST(Lifecycle, EngineThatDoesNotAnswerDoesNotHoldCallersOrShutdown) {
  ServerOptions options = TestOptions();
  options.drain = absl::Milliseconds(100);
  auto engine = Manual();
  FakeEngine* fake = engine.get();
  TestServer server(std::move(engine), options);
  Call stuck(&server, TextRequest("p", "s"));
  fake->WaitForRequest("s");
  fake->Block(true);
  server.RequestStop();
  // Cancelled by the shutdown, though the engine has not said a word.
  EXPECT_FALSE(stuck.Finish().ok());
  EXPECT_EQ(server.Wait().exit_code, 0);
}

TEST(Lifecycle, FaultClosesStreamsAndExitsNonZero) {
  TestServer server(Manual());
  Call running(&server, TextRequest("p", "r"));
  server.engine().WaitForRequest("r");
  server.engine().Admit("r");
  server.engine().Fault();
  const grpc::Status status = running.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INTERNAL);
  EXPECT_TRUE(running.messages().empty());
  const Server::Result result = server.Wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("a made-up fault"));
}

TEST(Lifecycle, WatchersHearEveryChange) {
  TestServer server(Manual());
  auto stub = grpc::health::v1::Health::NewStub(server.channel());
  grpc::ClientContext known_context, unknown_context;
  HealthCheckRequest known, unknown;
  known.set_service("qwend.v1.Inference");
  unknown.set_service("no.such.Service");
  HealthCheckResponse response;
  auto watch = stub->Watch(&known_context, known);
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  auto watch_unknown = stub->Watch(&unknown_context, unknown);
  ASSERT_TRUE(watch_unknown->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  EXPECT_EQ(server.Health("no.such.Service"), HealthCheckResponse::UNKNOWN) << "NOT_FOUND";
  // A watcher that goes away is forgotten.
  {
    grpc::ClientContext gone_context;
    auto gone = stub->Watch(&gone_context, known);
    ASSERT_TRUE(gone->Read(&response));
    gone_context.TryCancel();
    EXPECT_EQ(gone->Finish().error_code(), StatusCode::CANCELLED);
  }
  const absl::Time start = absl::Now();
  server.RequestStop();
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch->Read(&response));
  watch->Finish();
  EXPECT_FALSE(watch_unknown->Read(&response));
  watch_unknown->Finish();
  EXPECT_EQ(server.Wait().exit_code, 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5)) << "watchers do not hold up a shutdown";
}

TEST(Lifecycle, CallsWhileLoading) {
  ServerOptions options = TestOptions();
  options.metrics_listen = "127.0.0.1:0";
  auto server = Server::Open(options);
  ASSERT_TRUE(server.ok()) << server.status();
  absl::Notification may_load;
  Server::Result result;
  std::thread thread([&] {
    result = (*server)->Run([&](const EngineOptions&) -> absl::StatusOr<std::unique_ptr<Engine>> {
      may_load.WaitForNotification();
      return absl::NotFoundError("/models/fake/config.json: no such file");
    });
  });
  auto stub = v1::Inference::NewStub(Connect((*server)->port()));
  grpc::ClientContext a, b;
  v1::GenerateUnaryResponse response;
  v1::ModelInfo info;
  const grpc::Status status = stub->GenerateUnary(&a, TextRequest("p"), &response);
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_GT(DetailOf<google::rpc::RetryInfo>(status).retry_delay().seconds(), 0);
  EXPECT_EQ(stub->GetModelInfo(&b, {}, &info).error_code(), StatusCode::UNAVAILABLE);
  EXPECT_THAT(testing::HttpGet((*server)->metrics_port(), "/metrics"),
              HasSubstr("qwend_requests_running{model=\"fake\"} 0"));
  may_load.Notify();
  thread.join();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error, "/models/fake/config.json: no such file");
}

TEST(Lifecycle, StopWhileLoadingDoesNotWaitForTheModel) {
  auto server = Server::Open(TestOptions());
  ASSERT_TRUE(server.ok()) << server.status();
  auto may_load = std::make_shared<absl::Notification>();
  auto loader_done = std::make_shared<absl::Notification>();
  (*server)->RequestStop();
  const Server::Result result = (*server)->Run(
      [may_load, loader_done](const EngineOptions&) -> absl::StatusOr<std::unique_ptr<Engine>> {
        may_load->WaitForNotification();
        loader_done->Notify();
        return absl::CancelledError("late");
      });
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(result.loader_left_behind);
  may_load->Notify();
  loader_done->WaitForNotification();
}

TEST(Lifecycle, PortsInUseAreNamed) {
  auto first = Server::Open(TestOptions());
  ASSERT_TRUE(first.ok()) << first.status();
  ServerOptions options = TestOptions();
  options.listen = absl::StrCat("127.0.0.1:", (*first)->port());
  auto second = Server::Open(options);
  ASSERT_FALSE(second.ok()) << "SO_REUSEPORT would let it bind";
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr(absl::StrCat("--listen=", options.listen, ": address already in use")));
  options = TestOptions();
  options.health_listen = absl::StrCat("127.0.0.1:", (*first)->port());
  second = Server::Open(options);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--health_listen="));
}

TEST(Lifecycle, PlaintextHealthPortHasNothingButHealth) {
  ServerOptions options = TestOptions();
  options.health_listen = "127.0.0.1:0";
  auto server = Server::Open(options);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto channel = Connect((*server)->health_port());
  grpc::ClientContext a, b;
  HealthCheckResponse response;
  EXPECT_TRUE(grpc::health::v1::Health::NewStub(channel)->Check(&a, {}, &response).ok());
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  v1::ModelInfo info;
  EXPECT_EQ(v1::Inference::NewStub(channel)->GetModelInfo(&b, {}, &info).error_code(),
            StatusCode::UNIMPLEMENTED);
}

TEST(Lifecycle, BadTlsFilesAreNamed) {
  ServerOptions options = TestOptions();
  options.tls_cert = "/no/such.pem";
  options.tls_key = "/no/such.key";
  auto server = Server::Open(options);
  ASSERT_FALSE(server.ok());
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("--tls_cert=/no/such.pem"));
}

// Before any thread of this program: one that gRPC made without the mask, and keeps, would take the
// signal and end the process.
[[maybe_unused]] const bool kBlocked = (BlockStopSignals(), true);

TEST(Signals, EachOneIsHeardOnAThread) {
  absl::Mutex mu;
  int heard = 0;
  {
    SignalThread signals([&](int) {
      absl::MutexLock lock(&mu);
      ++heard;
    });
    for (int i = 1; i <= 2; ++i) {
      kill(getpid(), SIGTERM);
      absl::MutexLock lock(&mu);
      const auto there = [&] { return heard >= i; };
      EXPECT_TRUE(mu.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(5)));
    }
  }
  EXPECT_EQ(heard, 2);
}

TEST(WatchdogTest, BarksOnlyInTime) {
  std::atomic<int> barks = 0;
  {
    Watchdog dog([&] { ++barks; });
    dog.Limit(absl::Now() + absl::Seconds(600));
  }
  EXPECT_EQ(barks, 0);
  Watchdog dog([&] { ++barks; });
  dog.Limit(absl::Now() + absl::Seconds(600));
  dog.Limit(absl::Now() + absl::Milliseconds(20));
  for (int i = 0; i < 1000 && barks == 0; ++i) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(barks, 1);
}

class CountingTask : public DeliveryTask {
 public:
  void Deliver() override {
    EXPECT_EQ(running_.fetch_add(1), 0) << "never on two threads";
    seen_ = wanted_.load();
    absl::SleepFor(absl::Microseconds(200));
    running_.fetch_sub(1);
  }
  std::atomic<int> wanted_ = 0;
  std::atomic<int> seen_ = 0;

 private:
  std::atomic<int> running_ = 0;
};

TEST(DeliveryPoolTest, SerialAndNothingIsMissed) {
  auto task = std::make_shared<CountingTask>();
  {
    DeliveryPool pool(4);
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          ++task->wanted_;
          pool.Schedule(task);
          absl::SleepFor(absl::Microseconds(50));
        }
      });
    }
    for (auto& t : threads) t.join();
  }
  EXPECT_EQ(task->seen_, 600);
}

}  // namespace
}  // namespace qwend
