#include "server/logging.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <spdlog/formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace qwend {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kTextPattern[] = "%Y-%m-%dT%H:%M:%S.%e%z %l %v";
constexpr char kEventLogger[] = "qwend.events";

bool json_lines = false;  // set once, before there are threads

std::string Dump(const Json& line) {
  // Bytes that are not UTF-8 (a peer's name, say) must not end the program.
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Now() {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
}

Json LineStart(spdlog::level::level_enum level) {
  const auto name = spdlog::level::to_string_view(level);
  return Json{{"time", Now()}, {"level", std::string(name.data(), name.size())}};
}

void AddEvent(std::string_view name, const Json& fields, Json* line) {
  (*line)["event"] = name;
  if (fields.is_object()) line->update(fields);  // an event without fields has null
}

// Wraps a line of free text into a JSON object.
class JsonFormatter : public spdlog::formatter {
 public:
  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    Json line = LineStart(message.level);
    line["message"] = std::string(message.payload.data(), message.payload.size());
    const std::string text = Dump(line) + "\n";
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>();
  }
};

void FromGrpc(gpr_log_func_args* args) {
  const char* file = args->file;
  for (const char* p = args->file; *p != '\0'; ++p) {
    if (*p == '/') file = p + 1;
  }
  spdlog::debug("grpc {}:{} {}", file, args->line, args->message);
}

// Above all, strings of requests that are not UTF-8: a caller must not fill the log.
void FromProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  spdlog::debug("protobuf {}", message);
}

void Log(spdlog::level::level_enum level, std::string_view name, const Json& fields) {
  std::shared_ptr<spdlog::logger> logger = spdlog::get(kEventLogger);
  if (logger == nullptr) logger = spdlog::default_logger();
  if (!logger->should_log(level)) return;
  if (!json_lines) {
    logger->log(level, "{}", EventText(name, fields));
    return;
  }
  Json line = LineStart(level);
  AddEvent(name, fields, &line);
  logger->log(level, "{}", Dump(line));
}

}  // namespace

void InitLogging(const std::string& level, bool json) {
  json_lines = json;
  auto text_sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  auto event_sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  text_sink->set_pattern(kTextPattern);
  event_sink->set_pattern(json ? "%v" : kTextPattern);
  if (json) text_sink->set_formatter(std::make_unique<JsonFormatter>());
  auto text = std::make_shared<spdlog::logger>("qwend", text_sink);
  auto events = std::make_shared<spdlog::logger>(kEventLogger, event_sink);
  const auto threshold = spdlog::level::from_str(level);
  for (const auto& logger : {text, events}) {
    logger->set_level(threshold);
    logger->flush_on(spdlog::level::info);
  }
  spdlog::drop_all();
  spdlog::set_default_logger(text);
  spdlog::register_logger(events);
  gpr_set_log_function(&FromGrpc);
  google::protobuf::SetLogHandler(&FromProtobuf);
}

void LogEvent(std::string_view name, const Json& fields) { Log(spdlog::level::info, name, fields); }

void LogWarning(std::string_view name, const Json& fields) {
  Log(spdlog::level::warn, name, fields);
}

std::string EventText(std::string_view name, const Json& fields) {
  std::string text(name);
  for (const auto& [key, value] : fields.items()) {
    const bool plain =
        value.is_string() &&
        value.get_ref<const std::string&>().find_first_of(" \"\n\\=") == std::string::npos &&
        !value.get_ref<const std::string&>().empty();
    absl::StrAppend(&text, " ", key, "=",
                    plain ? value.get_ref<const std::string&>() : Dump(value));
  }
  return text;
}

std::string EventJson(std::string_view name, const Json& fields) {
  Json line;
  AddEvent(name, fields, &line);
  return Dump(line);
}

void FlushLogs() {
  if (auto logger = spdlog::get(kEventLogger)) logger->flush();
  spdlog::default_logger()->flush();
}

}  // namespace qwend
