#include "core/cpu_quota.h"

#include "core/control_groups.h"

#include <algorithm>
#include <cmath>
#include <fstream>

namespace headroom {
namespace {

std::optional<double> quota_in(const std::string& folder, bool is_version_2) {
  double quota_us = 0, period_us = 0;
  if (is_version_2) {
    std::ifstream file(folder + "/cpu.max");  // "max 100000" where there is no limit
    if (!(file >> quota_us >> period_us)) return std::nullopt;
  } else {
    std::ifstream quota(folder + "/cpu.cfs_quota_us");  // -1 where there is no limit
    std::ifstream period(folder + "/cpu.cfs_period_us");
    if (!(quota >> quota_us) || !(period >> period_us)) return std::nullopt;
  }
  if (quota_us <= 0 || period_us <= 0) return std::nullopt;
  return quota_us / period_us;
}

}  // namespace

std::optional<CpuQuota> cpu_quota(const std::string& root) {
  std::optional<CpuQuota> least;
  for_each_own_group("cpu", root, [&](const ControlGroup& group) {
    const auto cpus = quota_in(root + group.folder, group.is_version_2);
    if (!cpus || (least && *cpus >= least->num_cpus)) return;
    least = CpuQuota{*cpus, group.folder + (group.is_version_2 ? "/cpu.max" : "/cpu.cfs_quota_us")};
  });
  return least;
}

int threads_of(const CpuQuota& quota) {
  constexpr double kMost = 1 << 20;
  return std::max(1, static_cast<int>(std::lround(std::min(quota.num_cpus, kMost))));
}

}  // namespace headroom
