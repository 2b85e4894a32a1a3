// The server's flags, parsed once into a struct that nobody changes afterwards.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/engine.h"

namespace qwend {

struct ServerOptions {
  EngineOptions engine;
  std::string listen;          // host:port; port 0 takes a free one
  std::string metrics_listen;  // host:port; empty: no metrics endpoint
  std::string health_listen;   // host:port of the plaintext health port; empty: none
  int max_stop_strings = 16;
  int max_buffered_tokens = 1024;  // a stream whose reader is further behind is ended
  absl::Duration drain = absl::Seconds(30);
  int max_message_bytes = 16 << 20;
  std::string tls_cert;       // PEM files; all empty: plaintext
  std::string tls_key;        //
  std::string tls_client_ca;  // set: a client must show a certificate that this one signed
  std::string auth_token_file;
  std::string log_level = "info";
  bool log_json = false;
  bool reflection = true;
  bool vllm_metric_aliases = false;
};

struct CommandLine {
  ServerOptions options;
  std::optional<std::string> print;  // --help or --version: print this and exit with 0
};

// Looks up an environment variable; null when unset.
using Environment = std::function<const char*(const std::string& name)>;

// Later wins: a flag's default, QWEND_<NAME> of the environment, then the command line and its
// --flagfile in order. `args` is without the program's name. INVALID_ARGUMENT, in one line, names
// the flag and what it takes.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& args,
                                             const Environment& environment);

// The first folder that exists of: beside the executable (build tree or installed), the source
// tree.
std::string FindDemoModel();

}  // namespace qwend
