#include "server/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>

namespace qwend {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& args,
                                  const std::map<std::string, std::string>& environment = {}) {
  return ParseCommandLine(args, [&](const std::string& name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  });
}

std::string ErrorOf(const std::vector<std::string>& args,
                    const std::map<std::string, std::string>& environment = {}) {
  const auto line = Parse(args, environment);
  if (line.ok()) return "";
  EXPECT_EQ(line.status().code(), absl::StatusCode::kInvalidArgument);
  const std::string message(line.status().message());
  EXPECT_THAT(message, Not(HasSubstr("\n"))) << "an error is one line";
  return message;
}

TEST(Options, DefaultsServeTheDemoModel) {
  const auto line = Parse({});
  ASSERT_TRUE(line.ok()) << line.status();
  const ServerOptions& o = line->options;
  EXPECT_EQ(o.listen, "0.0.0.0:50051");
  EXPECT_EQ(o.metrics_listen, "0.0.0.0:9464");
  EXPECT_EQ(o.health_listen, "");
  EXPECT_EQ(o.max_stop_strings, 16);
  EXPECT_EQ(o.drain, absl::Seconds(30));
  EXPECT_EQ(o.max_message_bytes, 16 << 20);
  EXPECT_EQ(o.engine.profile_every, 64);
  EXPECT_TRUE(std::filesystem::exists(o.engine.model_dir / "config.json")) << o.engine.model_dir;
}

TEST(Options, CommandLineWinsOverFlagfileOverEnvironment) {
  const std::string path = ::testing::TempDir() + "/qwend_flagfile";
  std::ofstream(path) << "# a comment\n\n--max_queued=7\nthreads=3\n--threads=4\n";
  // A line without dashes is an error, named with its file.
  EXPECT_THAT(ErrorOf({"--flagfile=" + path}), HasSubstr(path));
  std::ofstream(path) << "# a comment\n\n--max_queued=7\n  --threads=4\n";
  const auto line =
      Parse({"--flagfile", path, "--max_queued", "9"},
            {{"QWEND_MAX_QUEUED", "5"}, {"QWEND_THREADS", "2"}, {"QWEND_DEVICE", "1"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.engine.max_queued, 9);
  EXPECT_EQ(line->options.engine.threads, 4);
  EXPECT_EQ(line->options.engine.device, 1);
  // Nothing is left over for the next parse.
  EXPECT_EQ(Parse({})->options.engine.max_queued, 256);
}

TEST(Options, EveryKindOfFlagIsRead) {
  const auto line =
      Parse({"--model=/m", "--backend=cpu", "--decode_plan=explicit", "--listen=[::]:0",
             "--metrics_listen=", "--health_listen=1.2.3.4:5", "--memory_fraction=0.5",
             "--drain_seconds=1.5", "--noreflection", "--vllm_metric_aliases", "--log_format=json",
             "--log_level=off", "--prefill_chunk_tokens=128", "--prefix_cache=false",
             "--tls_cert=c", "--tls_key=k", "--tls_client_ca=a"});
  ASSERT_TRUE(line.ok()) << line.status();
  const ServerOptions& o = line->options;
  EXPECT_EQ(o.engine.model_dir, "/m");
  EXPECT_EQ(o.engine.decode_plan, DecodePlan::kExplicit);
  EXPECT_EQ(o.drain, absl::Milliseconds(1500));
  EXPECT_FALSE(o.reflection);
  EXPECT_TRUE(o.vllm_metric_aliases);
  EXPECT_TRUE(o.log_json);
  EXPECT_EQ(o.engine.prefill_chunk_tokens, 128);
  EXPECT_EQ(o.tls_client_ca, "a");
}

TEST(Options, MistakesAreNamed) {
  EXPECT_THAT(ErrorOf({"--bogus=1"}), HasSubstr("unknown flag --bogus"));
  EXPECT_THAT(ErrorOf({"--helpfull"}), HasSubstr("unknown flag --helpfull"));
  EXPECT_THAT(ErrorOf({"serve"}), HasSubstr("\"serve\""));
  EXPECT_THAT(ErrorOf({"--max_queued"}), HasSubstr("--max_queued needs a value"));
  EXPECT_THAT(ErrorOf({"--max_queued=many"}), HasSubstr("--max_queued"));
  EXPECT_THAT(ErrorOf({"--max_queued=-1"}), HasSubstr("--max_queued: -1"));
  EXPECT_THAT(ErrorOf({"--reflection=perhaps"}), HasSubstr("--reflection"));
  EXPECT_THAT(ErrorOf({}, {{"QWEND_THREADS", "x"}}), HasSubstr("QWEND_THREADS"));
  EXPECT_THAT(ErrorOf({"--flagfile=/nonexistent"}), HasSubstr("/nonexistent"));
  EXPECT_THAT(ErrorOf({"--backend=tpu"}), HasSubstr("auto, cuda, cpu"));
  EXPECT_THAT(ErrorOf({"--listen=50051"}), HasSubstr("--listen"));
  EXPECT_THAT(ErrorOf({"--listen=a:70000"}), HasSubstr("--listen"));
  EXPECT_THAT(ErrorOf({"--memory_fraction=1.5"}), HasSubstr("(0, 1]"));
  EXPECT_THAT(ErrorOf({"--memory_fraction=nan"}), HasSubstr("--memory_fraction"));
  EXPECT_THAT(ErrorOf({"--drain_seconds=-1"}), HasSubstr("--drain_seconds"));
  EXPECT_THAT(ErrorOf({"--prefill_chunk_tokens=100"}), HasSubstr("multiple of 64"));
  EXPECT_THAT(ErrorOf({"--tls_cert=x"}), HasSubstr("--tls_key"));
  EXPECT_THAT(ErrorOf({"--tls_client_ca=x"}), HasSubstr("--tls_cert"));
  EXPECT_THAT(ErrorOf({"--prefix_cache"}), HasSubstr("not built"));
}

TEST(Options, FlagfileThatNamesItselfEnds) {
  const std::string path = ::testing::TempDir() + "/qwend_flagfile_loop";
  std::ofstream(path) << "--flagfile=" << path << "\n";
  EXPECT_THAT(ErrorOf({"--flagfile=" + path}), HasSubstr("deep"));
}

TEST(Options, HelpAndVersion) {
  const auto help = Parse({"--help"});
  ASSERT_TRUE(help.ok() && help->print.has_value());
  for (const char* flag : {"model",
                           "backend",
                           "device",
                           "decode_plan",
                           "listen",
                           "metrics_listen",
                           "health_listen",
                           "max_sequences",
                           "max_context_tokens",
                           "max_queued",
                           "max_stop_strings",
                           "prefill_chunk_tokens",
                           "memory_fraction",
                           "profile_every",
                           "prefix_cache",
                           "drain_seconds",
                           "max_message_bytes",
                           "tls_cert",
                           "tls_key",
                           "tls_client_ca",
                           "auth_token_file",
                           "log_level",
                           "log_format",
                           "reflection",
                           "threads",
                           "vllm_metric_aliases"}) {
    EXPECT_THAT(*help->print, HasSubstr(std::string("  --") + flag + "  "));
  }
  const auto version = Parse({"--version"});
  ASSERT_TRUE(version.ok() && version->print.has_value());
  EXPECT_THAT(*version->print, HasSubstr("qwend "));
}

}  // namespace
}  // namespace qwend
