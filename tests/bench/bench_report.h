// A BenchResult as tables for people and as JSON for programs.
#pragma once

#include <string>

#include "tests/bench/model_bench.h"

namespace qwend::bench {

std::string ReportText(const BenchResult& result);
std::string ReportJson(const BenchResult& result);

}  // namespace qwend::bench
