#include "kernels/cpu/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace qwend::cpu {
namespace {

// The first number of a file, or nothing when there is no such file or it says "max".
std::optional<int64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// "key: value unit" or "key value" lines, as in /proc/meminfo and memory.stat.
std::optional<int64_t> ReadField(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name;
    int64_t value = 0;
    if (fields >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

// The folders whose limits bind this process for one controller, innermost first: version 2 has one
// hierarchy for all, version 1 one for each. Inside a container the path of /proc/self/cgroup may
// not exist; the mount point itself then stands for it.
std::vector<std::string> CgroupFolders(const std::string& controller) {
  std::vector<std::string> folders;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string root = "/sys/fs/cgroup";
    if (!controllers.empty()) {
      if (("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
      root += "/" + controller;
    }
    std::string path = line.substr(second + 1);
    while (path.size() > 1) {
      folders.push_back(root + path);
      path.resize(std::max<size_t>(path.rfind('/'), 1));
      if (path == "/") break;
    }
    folders.push_back(root);
  }
  return folders;
}

}  // namespace

int UsableProcessors() {
  int count = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) count = CPU_COUNT(&mask);
  for (const std::string& folder : CgroupFolders("cpu")) {
    std::optional<int64_t> quota = ReadNumber(folder + "/cpu.cfs_quota_us");
    std::optional<int64_t> period = ReadNumber(folder + "/cpu.cfs_period_us");
    std::ifstream both(folder + "/cpu.max");
    int64_t q = 0;
    int64_t p = 0;
    if (both >> q >> p) {
      quota = q;
      period = p;
    }
    if (!quota || !period || *quota <= 0 || *period <= 0) continue;
    count = static_cast<int>(std::min<int64_t>(count, (*quota + *period - 1) / *period));
  }
  return std::max(count, 1);
}

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t value = line.find_first_not_of(" \t", line.find(':') + 1);
    if (value != std::string::npos) return line.substr(value);
  }
  return "unknown processor";
}

MemoryStatus QueryMemory() {
  constexpr int64_t kKiB = 1024;
  MemoryStatus status;
  status.total = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  status.free = ReadField("/proc/meminfo", "MemAvailable:").value_or(status.total / kKiB) * kKiB;
  for (const std::string& folder : CgroupFolders("memory")) {
    std::optional<int64_t> limit = ReadNumber(folder + "/memory.max");
    std::optional<int64_t> used = ReadNumber(folder + "/memory.current");
    if (!limit) {
      limit = ReadNumber(folder + "/memory.limit_in_bytes");
      used = ReadNumber(folder + "/memory.usage_in_bytes");
    }
    if (!limit || *limit <= 0 || *limit >= status.total) continue;
    status.total = *limit;
    // Cached files give way to allocations.
    const int64_t cache = ReadField(folder + "/memory.stat", "inactive_file").value_or(0) +
                          ReadField(folder + "/memory.stat", "active_file").value_or(0);
    const int64_t held = std::max<int64_t>(0, used.value_or(0) - cache);
    status.free = std::clamp<int64_t>(*limit - held, 0, status.free);
  }
  return status;
}

}  // namespace qwend::cpu
