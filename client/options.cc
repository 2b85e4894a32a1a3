#include "client/options.h"

#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

ABSL_FLAG(std::string, server, "127.0.0.1:50051", "host:port of the server");
ABSL_FLAG(bool, tls, false, "use TLS (implied by the other --tls_ flags)");
ABSL_FLAG(std::string, tls_ca, "", "PEM file of trusted roots; default: the system's");
ABSL_FLAG(std::string, tls_cert, "", "PEM file of the client's certificate");
ABSL_FLAG(std::string, tls_key, "", "PEM file of the client's private key");
ABSL_FLAG(std::string, tls_server_name, "", "name expected in the server's certificate");
ABSL_FLAG(std::string, token, "", "bearer token (visible in the process list: see --token_file)");
ABSL_FLAG(std::string, token_file, "", "file whose first line is the bearer token");
ABSL_FLAG(double, timeout, 0, "seconds one call may take; 0: no limit");
ABSL_FLAG(double, wait, 0, "seconds to wait for the server to be SERVING before the command");

ABSL_FLAG(std::string, system, "", "system message of the chat");
ABSL_FLAG(bool, raw, false, "send the prompt as plain text, without the chat template");
ABSL_FLAG(bool, parse_special, false, "--raw, tokenize: special tokens in the text count as such");
ABSL_FLAG(std::vector<std::string>, token_ids, {}, "prompt as token ids, with commas");
ABSL_FLAG(std::optional<bool>, thinking, std::nullopt, "turn the template's thinking on or off");
ABSL_FLAG(std::string, request_id, "", "id of the request (for abort); default: the server's");
ABSL_FLAG(int32_t, priority, 0, "higher goes first among waiting requests");
ABSL_FLAG(std::optional<float>, temperature, std::nullopt, "0: greedy; default: the model's");
ABSL_FLAG(std::optional<float>, top_p, std::nullopt, "in (0, 1]");
ABSL_FLAG(std::optional<int32_t>, top_k, std::nullopt, "0: off");
ABSL_FLAG(std::optional<float>, min_p, std::nullopt, "in [0, 1)");
ABSL_FLAG(std::optional<float>, repetition_penalty, std::nullopt, "1: off");
ABSL_FLAG(std::optional<float>, presence_penalty, std::nullopt, "in [-2, 2]");
ABSL_FLAG(std::optional<float>, frequency_penalty, std::nullopt, "in [-2, 2]");
ABSL_FLAG(std::optional<uint64_t>, seed, std::nullopt, "same seed and request: same tokens");
ABSL_FLAG(std::optional<uint32_t>, max_tokens, std::nullopt, "default: what the context leaves");
ABSL_FLAG(uint32_t, min_tokens, 0, "no end of sequence before so many tokens");
ABSL_FLAG(uint32_t, num_outputs, 0, "independent samples of one prompt; 0: one");
ABSL_FLAG(std::string, stop, "", "stop string; may be given several times");
ABSL_FLAG(std::vector<std::string>, stop_token_ids, {}, "token ids that end the answer");
ABSL_FLAG(bool, ignore_eos, false, "go on past the model's end of sequence");
ABSL_FLAG(bool, include_stop_string, false, "keep the matched stop string in the text");
ABSL_FLAG(bool, show_special, false, "keep special tokens in the text");
ABSL_FLAG(bool, ids, false, "print token ids instead of text");

ABSL_FLAG(bool, json, false, "one JSON object per message on standard output");
ABSL_FLAG(bool, no_color, false, "no colours, also on a terminal");
ABSL_FLAG(std::string, service, "", "health: the service asked for; default: the whole server");
ABSL_FLAG(uint32_t, batch, 0, "profile: batch size; 0: the one with most steps");
ABSL_FLAG(int32_t, concurrency, 1, "bench: streams at a time");
ABSL_FLAG(int32_t, requests, 16, "bench: requests in all");
ABSL_FLAG(int32_t, warmup, 1, "bench: requests before the clock starts");
ABSL_FLAG(std::string, prompts, "", "bench: file with one prompt a line; default: a built-in set");

namespace qwend::client {
namespace {

using Values = std::map<std::string, std::vector<std::string>>;  // as given, in order

absl::Status SetFlag(absl::string_view arg, const std::vector<std::string>& args, size_t* next,
                     Values* values) {
  absl::string_view body = arg.substr(absl::StartsWith(arg, "--") ? 2 : 1);
  const size_t equals = body.find('=');
  std::string name(body.substr(0, equals));
  std::optional<std::string> value;
  if (equals != absl::string_view::npos) value = std::string(body.substr(equals + 1));

  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  if (flag == nullptr && absl::StartsWith(name, "no") && !value) {
    absl::CommandLineFlag* positive = absl::FindCommandLineFlag(name.substr(2));
    if (positive != nullptr && positive->IsOfType<bool>()) {
      flag = positive;
      name = name.substr(2);
      value = "false";
    }
  }
  if (flag == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("unknown flag --", name, "; see --help"));
  }
  if (!value && flag->IsOfType<bool>()) value = "true";
  if (!value) {
    if (*next >= args.size()) {
      return absl::InvalidArgumentError(absl::StrCat("flag --", name, " needs a value"));
    }
    value = args[(*next)++];
  }
  std::string error;
  if (!flag->ParseFrom(*value, &error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("flag --", name, ": '", *value, "' will not do (", flag->Help(), ")"));
  }
  (*values)[name].push_back(*value);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint32_t>> ParseIds(absl::string_view flag,
                                               const std::vector<std::string>& words) {
  std::vector<uint32_t> ids;
  for (const std::string& word : words) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(word, &id)) {
      return absl::InvalidArgumentError(
          absl::StrCat("flag --", flag, ": '", word, "' is not a token id"));
    }
    ids.push_back(id);
  }
  return ids;
}

absl::StatusOr<ConnectionOptions> ReadConnection() {
  ConnectionOptions c;
  c.server = absl::GetFlag(FLAGS_server);
  c.tls_ca = absl::GetFlag(FLAGS_tls_ca);
  c.tls_cert = absl::GetFlag(FLAGS_tls_cert);
  c.tls_key = absl::GetFlag(FLAGS_tls_key);
  c.tls_server_name = absl::GetFlag(FLAGS_tls_server_name);
  c.tls = absl::GetFlag(FLAGS_tls) || !c.tls_ca.empty() || !c.tls_cert.empty() ||
          !c.tls_key.empty() || !c.tls_server_name.empty();
  if (c.tls_cert.empty() != c.tls_key.empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key go together");
  }
  c.token = absl::GetFlag(FLAGS_token);
  if (const std::string file = absl::GetFlag(FLAGS_token_file); !file.empty()) {
    if (!c.token.empty())
      return absl::InvalidArgumentError("give --token or --token_file, not both");
    std::ifstream in(file);
    if (!std::getline(in, c.token) || absl::StripAsciiWhitespace(c.token).empty()) {
      return absl::InvalidArgumentError(absl::StrCat("--token_file ", file, ": no token in it"));
    }
    c.token = std::string(absl::StripAsciiWhitespace(c.token));
  }
  if (const double s = absl::GetFlag(FLAGS_timeout); s > 0) c.timeout = absl::Seconds(s);
  if (const double s = absl::GetFlag(FLAGS_wait); s > 0) c.wait = absl::Seconds(s);
  return c;
}

absl::StatusOr<GenerationOptions> ReadGeneration(const Values& values) {
  GenerationOptions g;
  g.raw = absl::GetFlag(FLAGS_raw);
  g.parse_special = absl::GetFlag(FLAGS_parse_special);
  if (values.contains("token_ids")) {
    auto ids = ParseIds("token_ids", absl::GetFlag(FLAGS_token_ids));
    if (!ids.ok()) return ids.status();
    g.prompt = *std::move(ids);
  }
  g.system = absl::GetFlag(FLAGS_system);
  g.enable_thinking = absl::GetFlag(FLAGS_thinking);
  g.request_id = absl::GetFlag(FLAGS_request_id);
  g.priority = absl::GetFlag(FLAGS_priority);
  g.temperature = absl::GetFlag(FLAGS_temperature);
  g.top_p = absl::GetFlag(FLAGS_top_p);
  g.min_p = absl::GetFlag(FLAGS_min_p);
  g.repetition_penalty = absl::GetFlag(FLAGS_repetition_penalty);
  g.presence_penalty = absl::GetFlag(FLAGS_presence_penalty);
  g.frequency_penalty = absl::GetFlag(FLAGS_frequency_penalty);
  g.top_k = absl::GetFlag(FLAGS_top_k);
  g.seed = absl::GetFlag(FLAGS_seed);
  g.max_tokens = absl::GetFlag(FLAGS_max_tokens);
  g.min_tokens = absl::GetFlag(FLAGS_min_tokens);
  g.num_outputs = absl::GetFlag(FLAGS_num_outputs);
  if (const auto stops = values.find("stop"); stops != values.end()) g.stop_strings = stops->second;
  auto stop_ids = ParseIds("stop_token_ids", absl::GetFlag(FLAGS_stop_token_ids));
  if (!stop_ids.ok()) return stop_ids.status();
  g.stop_token_ids = *std::move(stop_ids);
  g.ignore_eos = absl::GetFlag(FLAGS_ignore_eos);
  g.include_stop_string = absl::GetFlag(FLAGS_include_stop_string);
  g.show_special = absl::GetFlag(FLAGS_show_special);
  g.ids = absl::GetFlag(FLAGS_ids);
  if (!g.system.empty() && (g.raw || g.prompt)) {
    return absl::InvalidArgumentError("--system belongs to a chat: not with --raw or --token_ids");
  }
  return g;
}

}  // namespace

absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& args, bool* help) {
  Options options;
  Values values;
  bool only_words = false;
  for (size_t next = 0; next < args.size();) {
    const std::string& arg = args[next++];
    if (!only_words && arg == "--") {
      only_words = true;
    } else if (!only_words && (arg == "--help" || arg == "-h" || arg == "-help")) {
      *help = true;
    } else if (!only_words && arg.size() > 1 && arg[0] == '-') {
      if (absl::Status set = SetFlag(arg, args, &next, &values); !set.ok()) return set;
    } else if (options.command.empty()) {
      options.command = arg;
    } else {
      options.arguments.push_back(arg);
    }
  }
  auto connection = ReadConnection();
  if (!connection.ok()) return connection.status();
  options.connection = *std::move(connection);
  auto generation = ReadGeneration(values);
  if (!generation.ok()) return generation.status();
  options.generation = *std::move(generation);
  options.bench = BenchOptions{.concurrency = absl::GetFlag(FLAGS_concurrency),
                               .requests = absl::GetFlag(FLAGS_requests),
                               .warmup = absl::GetFlag(FLAGS_warmup),
                               .prompts = absl::GetFlag(FLAGS_prompts)};
  if (options.bench.concurrency < 1 || options.bench.requests < 1 || options.bench.warmup < 0) {
    return absl::InvalidArgumentError(
        "--concurrency and --requests must be at least 1, --warmup at least 0");
  }
  options.service = absl::GetFlag(FLAGS_service);
  options.batch = absl::GetFlag(FLAGS_batch);
  options.json = absl::GetFlag(FLAGS_json);
  options.color = !absl::GetFlag(FLAGS_no_color);
  return options;
}

}  // namespace qwend::client
