// What this machine grants this process: processors and memory, container limits included.
#pragma once

#include <cstdint>
#include <string>

namespace qwend::cpu {

// Processors that this process may run on: its affinity mask, cut to its cgroup's processor quota.
int UsableProcessors();

std::string ProcessorName();  // as the system reports it

struct MemoryStatus {
  int64_t total =
      0;             // bytes that this process could ever use: the machine's, or its cgroup's limit
  int64_t free = 0;  // of these, available now
};
MemoryStatus QueryMemory();

}  // namespace qwend::cpu
