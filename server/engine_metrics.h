// The metrics that are read from the engine at the time of a scrape.
#pragma once

#include <string>
#include <vector>

#include "engine/engine.h"
#include "prometheus/metric_family.h"

namespace qwend {

// All families, in a fixed order, also when `engine` is null: the gauges are 0 then.
std::vector<prometheus::MetricFamily> CollectEngineMetrics(const Engine* engine,
                                                           const std::string& model,
                                                           bool vllm_aliases);

}  // namespace qwend
