#pragma once

#include <chrono>

namespace headroom {

/// Decides from what is measured, window by window, whether threads should sleep while they wait.
/// Begins with spinning. While threads sleep, the time that they stand in line says little, because
/// waking up is part of it; so the only way to find out is to spin for one window, at intervals
/// that double up to 16 s while the machine stays busy.
class ContentionPolicy {
 public:
  using Duration = std::chrono::duration<double>;

  /// `delay`: the time in `window` that the process's threads were ready and had no core because
  /// other processes had it, summed over threads. Returns whether threads should sleep from now on.
  bool should_sleep(Duration delay, Duration window);

 private:
  static constexpr double kBusyShare = 0.1;
  static constexpr Duration kShortestSleep{1.0};
  static constexpr Duration kLongestSleep{16.0};

  bool sleeps_ = false;
  Duration in_this_state_{0};
  Duration next_sleep_ = kShortestSleep;
};

}  // namespace headroom
