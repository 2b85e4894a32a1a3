#include "server/options.h"

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <system_error>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/flag_parser.h"
#include "server/version.h"

ABSL_FLAG(std::string, model, "",
          "the model folder: config.json, *.safetensors, tokenizer.json; empty: the demo model");
ABSL_FLAG(std::string, backend, "auto", "auto, cuda or cpu; auto takes cuda where there is a GPU");
ABSL_FLAG(int, device, 0, "the number of the GPU");
ABSL_FLAG(std::string, decode_plan, "auto",
          "auto, explicit, fused or persistent; auto measures fused and persistent at start-up in "
          "every batch size up to max_sequences and takes the one with less time a row over all");
ABSL_FLAG(std::string, listen, "0.0.0.0:50051",
          "host:port of the gRPC service; port 0: a free one");
ABSL_FLAG(std::string, metrics_listen, "0.0.0.0:9464",
          "host:port of the Prometheus endpoint /metrics; empty: none");
ABSL_FLAG(std::string, health_listen, "",
          "host:port of a plaintext port with nothing but health, for probes when TLS is on; "
          "empty: none");
ABSL_FLAG(int, max_sequences, 0, "how many requests run at once; 0: the backend's default");
ABSL_FLAG(int, max_context_tokens, 0,
          "prompt and answer together; 0: the model's, within the backend's default");
ABSL_FLAG(int, max_queued, 256, "how many accepted requests may wait");
ABSL_FLAG(int, max_stop_strings, 16, "how many stop strings a request may give");
ABSL_FLAG(int, max_buffered_tokens, 1024,
          "how far a stream's reader may fall behind, in tokens, before its request is ended");
ABSL_FLAG(int, prefill_chunk_tokens, 0,
          "prompt tokens between two decode steps, a multiple of 64; 0: the backend's default");
ABSL_FLAG(double, memory_fraction, 0.85, "share of the device's memory that may be taken, (0, 1]");
ABSL_FLAG(int, profile_every, 64, "one decode step in N is timed kernel by kernel; 0: none");
ABSL_FLAG(bool, prefix_cache, false, "reuse of common prompt beginnings; not built: only false");
ABSL_FLAG(double, drain_seconds, 30, "how long running requests may take to end after SIGTERM");
ABSL_FLAG(int, max_message_bytes, 16 << 20, "largest request message, in bytes");
ABSL_FLAG(std::string, tls_cert, "", "PEM file of the server's certificate chain; turns TLS on");
ABSL_FLAG(std::string, tls_key, "", "PEM file of the server's private key");
ABSL_FLAG(std::string, tls_client_ca, "",
          "PEM file of the authority that must have signed every client's certificate");
ABSL_FLAG(std::string, auth_token_file, "",
          "file of accepted bearer tokens, one a line; empty: anybody may call");
ABSL_FLAG(std::string, log_level, "info", "trace, debug, info, warn, error or off");
ABSL_FLAG(std::string, log_format, "text", "text or json");
ABSL_FLAG(bool, reflection, true, "gRPC server reflection");
ABSL_FLAG(bool, vllm_metric_aliases, false,
          "also export a few metrics under the names that routers of vLLM read");
ABSL_FLAG(int, threads, 0, "threads of the CPU backend; 0: one per core");

namespace qwend {
namespace {

constexpr char kEnvironmentPrefix[] = "QWEND_";

template <typename... Parts>
absl::Status Bad(absl::string_view flag, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", parts...));
}

template <typename T>
absl::Status InRange(absl::string_view flag, T value, T low, T high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Bad(flag, value, " is out of range; give ", low, " to ", high);
}

absl::Status OneOf(absl::string_view flag, const std::string& value,
                   const std::vector<std::string>& choices) {
  for (const std::string& c : choices) {
    if (value == c) return absl::OkStatus();
  }
  return Bad(flag, "\"", value, "\" is not known; give one of ", absl::StrJoin(choices, ", "));
}

absl::Status HostAndPort(absl::string_view flag, const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return Bad(flag, "\"", address, "\" is no address; give host:port, such as 0.0.0.0:50051");
  }
  return absl::OkStatus();
}

absl::StatusOr<ServerOptions> ReadFlags() {
  ServerOptions o;
  o.engine.model_dir = absl::GetFlag(FLAGS_model);
  o.engine.backend = absl::GetFlag(FLAGS_backend);
  o.engine.device = absl::GetFlag(FLAGS_device);
  o.engine.threads = absl::GetFlag(FLAGS_threads);
  o.engine.max_sequences = absl::GetFlag(FLAGS_max_sequences);
  o.engine.max_context_tokens = absl::GetFlag(FLAGS_max_context_tokens);
  o.engine.max_queued = absl::GetFlag(FLAGS_max_queued);
  o.engine.prefill_chunk_tokens = absl::GetFlag(FLAGS_prefill_chunk_tokens);
  o.engine.memory_fraction = absl::GetFlag(FLAGS_memory_fraction);
  o.engine.profile_every = absl::GetFlag(FLAGS_profile_every);
  o.listen = absl::GetFlag(FLAGS_listen);
  o.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  o.health_listen = absl::GetFlag(FLAGS_health_listen);
  o.max_stop_strings = absl::GetFlag(FLAGS_max_stop_strings);
  o.max_buffered_tokens = absl::GetFlag(FLAGS_max_buffered_tokens);
  o.max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes);
  o.tls_cert = absl::GetFlag(FLAGS_tls_cert);
  o.tls_key = absl::GetFlag(FLAGS_tls_key);
  o.tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca);
  o.auth_token_file = absl::GetFlag(FLAGS_auth_token_file);
  o.log_level = absl::GetFlag(FLAGS_log_level);
  o.log_json = absl::GetFlag(FLAGS_log_format) == "json";
  o.reflection = absl::GetFlag(FLAGS_reflection);
  o.vllm_metric_aliases = absl::GetFlag(FLAGS_vllm_metric_aliases);

  const std::string plan = absl::GetFlag(FLAGS_decode_plan);
  const double drain = absl::GetFlag(FLAGS_drain_seconds);
  constexpr int kMany = 1 << 24;
  const absl::Status checks[] = {
      OneOf("backend", o.engine.backend, {"auto", "cuda", "cpu"}),
      OneOf("decode_plan", plan, {"auto", "explicit", "fused", "persistent"}),
      OneOf("log_level", o.log_level, {"trace", "debug", "info", "warn", "error", "off"}),
      OneOf("log_format", absl::GetFlag(FLAGS_log_format), {"text", "json"}),
      HostAndPort("listen", o.listen),
      o.metrics_listen.empty() ? absl::OkStatus() : HostAndPort("metrics_listen", o.metrics_listen),
      o.health_listen.empty() ? absl::OkStatus() : HostAndPort("health_listen", o.health_listen),
      InRange("device", o.engine.device, 0, 1023),
      InRange("threads", o.engine.threads, 0, 4096),
      InRange("max_sequences", o.engine.max_sequences, 0, 4096),
      InRange("max_context_tokens", o.engine.max_context_tokens, 0, kMany),
      InRange("max_queued", o.engine.max_queued, 0, kMany),
      InRange("prefill_chunk_tokens", o.engine.prefill_chunk_tokens, 0, kMany),
      o.engine.prefill_chunk_tokens % 64 == 0
          ? absl::OkStatus()
          : Bad("prefill_chunk_tokens", o.engine.prefill_chunk_tokens, " is not a multiple of 64"),
      o.engine.memory_fraction > 0 && o.engine.memory_fraction <= 1
          ? absl::OkStatus()
          : Bad("memory_fraction", o.engine.memory_fraction, " is out of range; give (0, 1]"),
      InRange("profile_every", o.engine.profile_every, 0, kMany),
      InRange("max_stop_strings", o.max_stop_strings, 0, 4096),
      InRange("max_buffered_tokens", o.max_buffered_tokens, 1, kMany),
      InRange("max_message_bytes", o.max_message_bytes, 1024, 1 << 30),
      std::isfinite(drain) && drain >= 0 && drain <= 86400
          ? absl::OkStatus()
          : Bad("drain_seconds", drain, " is out of range; give 0 to 86400"),
      o.tls_cert.empty() == o.tls_key.empty()
          ? absl::OkStatus()
          : Bad(o.tls_cert.empty() ? "tls_cert" : "tls_key",
                "missing; --tls_cert and --tls_key go together"),
      o.tls_client_ca.empty() || !o.tls_cert.empty()
          ? absl::OkStatus()
          : Bad("tls_client_ca", "needs --tls_cert and --tls_key"),
      !absl::GetFlag(FLAGS_prefix_cache)
          ? absl::OkStatus()
          : Bad("prefix_cache", "the prefix cache is not built; leave it at false"),
  };
  for (const absl::Status& s : checks) {
    if (!s.ok()) return s;
  }
  o.drain = absl::Seconds(drain);
  o.engine.decode_plan = plan == "explicit"     ? DecodePlan::kExplicit
                         : plan == "fused"      ? DecodePlan::kFused
                         : plan == "persistent" ? DecodePlan::kPersistent
                                                : DecodePlan::kAuto;
  if (o.engine.model_dir.empty()) o.engine.model_dir = FindDemoModel();
  return o;
}

}  // namespace

std::string FindDemoModel() {
  std::error_code error;
  const std::filesystem::path exe = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path prefix = exe.parent_path().parent_path();  // of PREFIX/bin/qwend
  const std::filesystem::path candidates[] = {
      prefix.parent_path() / "models/demo",
      prefix / "share/qwend/models/demo",
      std::filesystem::path(QWEND_DEFAULT_MODEL),
  };
  for (const auto& c : candidates) {
    if (std::filesystem::exists(c / "config.json", error)) return c.string();
  }
  return QWEND_DEFAULT_MODEL;
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const Environment& environment) {
  const std::vector<std::string> flags = FlagsDefinedIn("server/options.cc");
  ResetFlags(flags);
  std::vector<std::string> switches;
  const absl::Status from_environment = ParseEnvironment(flags, kEnvironmentPrefix, environment);
  const absl::Status from_arguments = ParseArguments(flags, {"help", "version"}, args, &switches);
  CommandLine result;
  if (!switches.empty()) {
    result.print = switches[0] == "version"
                       ? absl::StrCat("qwend ", kVersion, "\n")
                       : absl::StrCat("qwend ", kVersion,
                                      ": serves a small Qwen decoder over gRPC.\n\n"
                                      "Every flag can also be set by the environment as "
                                      "QWEND_<NAME>, or in a --flagfile=PATH, one a line.\n\n",
                                      DescribeFlags(flags));
    return result;
  }
  if (!from_arguments.ok()) return from_arguments;
  if (!from_environment.ok()) return from_environment;
  absl::StatusOr<ServerOptions> options = ReadFlags();
  if (!options.ok()) return options.status();
  result.options = *std::move(options);
  return result;
}

}  // namespace qwend
