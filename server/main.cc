// The server: parses flags, opens its ports, loads the model, serves until SIGTERM or SIGINT.
// Exit code 0: stopped when asked to; 1: could not start, or the device failed, or closing hung;
// 2: bad flags.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "server/lifecycle.h"
#include "server/logging.h"
#include "server/options.h"
#include "server/signals.h"

namespace {

constexpr int kFailed = 1;
constexpr int kBadFlags = 2;

int Fail(int code, const std::string& message) {
  std::fprintf(stderr, "qwend: %s\n", message.c_str());
  return code;
}

int Run(const std::vector<std::string>& args) {
  const auto line = qwend::ParseCommandLine(
      args, [](const std::string& name) { return std::getenv(name.c_str()); });
  if (!line.ok()) return Fail(kBadFlags, std::string(line.status().message()));
  if (line->print) {
    std::fputs(line->print->c_str(), stdout);
    return 0;
  }
  const qwend::ServerOptions& options = line->options;
  qwend::InitLogging(options.log_level, options.log_json);

  auto server = qwend::Server::Open(options);
  if (!server.ok()) return Fail(kFailed, std::string(server.status().message()));
  qwend::Server::Result result;
  {
    qwend::SignalThread signals([&](int) { (*server)->RequestStop(); });
    result = (*server)->Run(&qwend::Engine::Create);
  }
  if (!result.error.empty()) Fail(result.exit_code, result.error);
  qwend::FlushLogs();
  if (result.loader_left_behind) {
    std::fflush(nullptr);
    std::_Exit(result.exit_code);
  }
  return result.exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  qwend::BlockStopSignals();
  try {
    return Run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::exception& e) {
    return Fail(kFailed, e.what());
  }
}
