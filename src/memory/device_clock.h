#pragma once

#include <chrono>

namespace headroom {

/// Shows the time at which all work that was handed to the device so far is done: what has to be
/// read before and after work that is measured, where the device works on while the program does.
struct DeviceClock {
  using duration = std::chrono::steady_clock::duration;
  using time_point = std::chrono::steady_clock::time_point;

  static time_point now();
};

}  // namespace headroom
