#pragma once

// What the benchmarks share: a clock, and the middle and the least of several measurements.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace headroom::benchmark {

/// Seconds of a clock that only goes forward.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// 0 when there is nothing to take it of.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// What counts where a machine has a slow and a fast pace. 0 when there is nothing to take it of.
inline double fastest(const std::vector<double>& values) {
  return values.empty() ? 0.0 : *std::min_element(values.begin(), values.end());
}

}  // namespace headroom::benchmark
