#include "core/available_memory.h"

#include "core/control_groups.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

namespace headroom {
namespace {

// The number after a word at the start of a line.
std::optional<std::int64_t> number_after(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, word.size(), word) != 0) continue;
    try {
      return std::stoll(line.substr(word.size()));
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  return std::nullopt;
}

// Nothing for "max", and for numbers so large that they mean it.
std::optional<std::int64_t> number_in(const std::string& path) {
  constexpr double kNoLimit = 4e18;
  std::ifstream file(path);
  double value = 0;
  if (!(file >> value) || value >= kNoLimit) return std::nullopt;
  return static_cast<std::int64_t>(value);
}

std::int64_t left_below(std::int64_t limit, const std::string& folder, bool is_version_2) {
  const std::int64_t used =
      number_in(folder + (is_version_2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
  const std::int64_t can_be_dropped =
      number_after(folder + "/memory.stat",
                   is_version_2 ? "inactive_file " : "total_inactive_file ")
          .value_or(0);
  return std::max<std::int64_t>(0, limit - std::max<std::int64_t>(0, used - can_be_dropped));
}

// The first number of statm is that of pages with addresses.
std::int64_t address_space_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

}  // namespace

AvailableMemory available_memory(const std::string& root) {
  AvailableMemory least{std::numeric_limits<std::int64_t>::max(), "nothing", false};
  const auto consider = [&](std::int64_t bytes, const std::string& source, bool is_address_space) {
    if (bytes < least.bytes) least = {bytes, source, is_address_space};
  };
  constexpr std::int64_t kKiB = 1024;
  if (const auto available = number_after(root + "/proc/meminfo", "MemAvailable:"))
    consider(*available * kKiB, "MemAvailable", false);
  for_each_own_group("memory", root, [&](const ControlGroup& group) {
    for (const char* name : {"/memory.max", "/memory.high", "/memory.limit_in_bytes"}) {
      if (const auto limit = number_in(root + group.folder + name))
        consider(left_below(*limit, root + group.folder, group.is_version_2), group.folder + name,
                 false);
    }
  });
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    consider(std::max<std::int64_t>(
                 0, static_cast<std::int64_t>(limit.rlim_cur) - address_space_bytes()),
             "RLIMIT_AS", true);
  }
  return least;
}

}  // namespace headroom
