// qwend-client: talks to a qwend server from the command line.

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/commands.h"
#include "client/format.h"
#include "client/interrupt.h"
#include "client/options.h"

namespace qwend::client {
namespace {

struct Command {
  const char* name;
  const char* arguments;
  const char* help;
  int (*run)(const Options&);
};

constexpr Command kCommands[] = {
    {"generate", "PROMPT", "stream one answer; - reads the prompt from standard input", Generate},
    {"chat", "", "talk; /help lists its commands", Chat},
    {"tokenize", "TEXT", "token ids and their pieces; with --system: of the rendered chat",
     Tokenize},
    {"detokenize", "ID...", "the text of token ids", Detokenize},
    {"info", "", "the model and the server", Info},
    {"health", "", "SERVING or not; exit code 0 only when SERVING", Health},
    {"abort", "REQUEST_ID...", "end running or waiting requests", Abort},
    {"profile", "", "the time of a decode step, kernel by kernel", Profile},
    {"bench", "", "load generator: latencies and tokens/s", Bench},
};

void PrintUsage(FILE* out) {
  fprintf(out, "usage: qwend-client COMMAND [ARGUMENT] [--flag=value ...]\n\n");
  for (const Command& c : kCommands) {
    fprintf(out, "  %-10s %-14s %s\n", c.name, c.arguments, c.help);
  }
  fprintf(out, "\nflags:\n");
  std::map<std::string, const absl::CommandLineFlag*> ours;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::EndsWith(flag->Filename(), "client/options.cc")) ours[std::string(name)] = flag;
  }
  for (const auto& [name, flag] : ours) {
    fprintf(out, "  --%-21s %s\n", name.c_str(), flag->Help().c_str());
  }
  fprintf(out,
          "\nexit codes: 0 ok, 1 failed or aborted, 2 wrong usage, 130 interrupted, 141 standard "
          "output closed\n");
}

int Main(int argc, char** argv) {
  InstallSignals();
  bool help = false;
  const std::vector<std::string> args(argv + 1, argv + argc);
  const auto options = ParseOptions(args, &help);
  if (help) {
    PrintUsage(stdout);
    return kOk;
  }
  if (!options.ok()) {
    PrintError(std::string(options.status().message()));
    return kUsage;
  }
  if (options->command.empty()) {
    PrintUsage(stderr);
    return kUsage;
  }
  for (const Command& c : kCommands) {
    if (options->command == c.name) return c.run(*options);
  }
  PrintError(absl::StrCat("unknown command '", options->command, "'; see --help"));
  return kUsage;
}

}  // namespace
}  // namespace qwend::client

int main(int argc, char** argv) { return qwend::client::Main(argc, argv); }
