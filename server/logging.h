// The log on standard error: free text from every part of the program, and one line of fields per
// event, as text or as JSON.
#pragma once

#include <string>
#include <string_view>

#include "nlohmann/json.hpp"

namespace qwend {

// Sets up spdlog's default logger, and sends what the gRPC library logs there at level debug.
// `level` is a name of --log_level.
void InitLogging(const std::string& level, bool json);

// "name key=value ..." or {"time":..., "level":"info", "event":name, ...}. `fields` is an object of
// scalars.
void LogEvent(std::string_view name, const nlohmann::ordered_json& fields);
void LogWarning(std::string_view name, const nlohmann::ordered_json& fields);

// The lines themselves, without time and level.
std::string EventText(std::string_view name, const nlohmann::ordered_json& fields);
std::string EventJson(std::string_view name, const nlohmann::ordered_json& fields);

void FlushLogs();

}  // namespace qwend
