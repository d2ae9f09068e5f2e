#pragma once

#include <optional>
#include <string>

namespace headroom {

/// The CPU time that a container or a service may use, as a control group sets it.
struct CpuQuota {
  double num_cpus = 0;  ///< seconds of CPU per second, e.g. 1.5
  std::string file;     ///< where it was read
};

/// The smallest quota of this process's control group and of the groups around it: cpu.max of
/// version 2, cpu.cfs_quota_us of version 1. Nothing where none is set, or where the files cannot
/// be read. `root` is put before each path, for tests.
std::optional<CpuQuota> cpu_quota(const std::string& root = "");

/// Threads that such a quota keeps busy, at least 1. A quota is rounded to the nearest number: one
/// thread too many and the system stops all of them for the rest of each period.
int threads_of(const CpuQuota& quota);

}  // namespace headroom
