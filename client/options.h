// The command line, parsed once. Every flag of the client stands in options.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace qwend::client {

struct ConnectionOptions {
  std::string server;  // host:port
  bool tls = false;
  std::string tls_ca;           // PEM file; empty: the system's roots
  std::string tls_cert;         // PEM file of a client certificate
  std::string tls_key;          // and its key
  std::string tls_server_name;  // the name that the server's certificate carries
  std::string token;            // sent as "authorization: Bearer ..."
  absl::Duration timeout = absl::InfiniteDuration();  // of one call
  absl::Duration wait = absl::ZeroDuration();         // for health SERVING, before the command runs
};

// Sampling and stopping as given; what was not given stays unset, so that the model's own defaults
// hold.
struct GenerationOptions {
  bool raw = false;                             // plain text instead of a chat
  bool parse_special = false;                   // special tokens written in a plain text count
  std::optional<std::vector<uint32_t>> prompt;  // token ids instead of text
  std::string system;
  std::optional<bool> enable_thinking;
  std::string request_id;
  int priority = 0;
  std::optional<float> temperature, top_p, min_p;
  std::optional<float> repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int32_t> top_k;
  std::optional<uint64_t> seed;
  std::optional<uint32_t> max_tokens;
  uint32_t min_tokens = 0;
  uint32_t num_outputs = 0;
  std::vector<std::string> stop_strings;
  std::vector<uint32_t> stop_token_ids;
  bool ignore_eos = false;
  bool include_stop_string = false;
  bool show_special = false;  // special tokens stay in the text
  bool ids = false;           // print token ids, not text
};

struct BenchOptions {
  int concurrency = 1;
  int requests = 16;
  int warmup = 1;
  std::string prompts;  // file with one prompt a line; empty: a built-in set
};

struct Options {
  std::string command;
  std::vector<std::string> arguments;  // after the command, flags taken out
  ConnectionOptions connection;
  GenerationOptions generation;
  BenchOptions bench;
  std::string service;  // health
  uint32_t batch = 0;   // profile
  bool json = false;
  bool color = true;  // where the output is a terminal
};

// INVALID_ARGUMENT names the flag and what it takes. `help` is set when --help was among them.
absl::StatusOr<Options> ParseOptions(const std::vector<std::string>& args, bool* help);

}  // namespace qwend::client
