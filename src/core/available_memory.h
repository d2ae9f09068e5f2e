#pragma once

#include <cstdint>
#include <string>

namespace headroom {

/// What this process may still take without swapping or being ended.
struct AvailableMemory {
  std::int64_t bytes = 0;
  std::string source;             ///< what says so: a file, or "RLIMIT_AS"
  bool is_address_space = false;  ///< addresses are what is limited, used or not
};

/// The least of MemAvailable, of what is left below the memory limits of this process's control
/// group and of the groups around it (version 2: memory.max and memory.high; version 1:
/// memory.limit_in_bytes; cached file pages that can be dropped count as free), and of what is left
/// of RLIMIT_AS. `root` is put before each path, for tests.
AvailableMemory available_memory(const std::string& root = "");

}  // namespace headroom
