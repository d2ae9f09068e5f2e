#include "core/contention.h"

#include <algorithm>

namespace headroom {

bool ContentionPolicy::should_sleep(Duration delay, Duration window) {
  in_this_state_ += window;
  if (sleeps_) {
    if (in_this_state_ < next_sleep_) return true;
    sleeps_ = false;
    next_sleep_ = std::min(2 * next_sleep_, kLongestSleep);
    in_this_state_ = Duration{0};
    return false;
  }
  // What was busy has ended: the next time is a new one.
  if (in_this_state_ > kShortestSleep) next_sleep_ = kShortestSleep;
  if (delay > kBusyShare * window) {
    sleeps_ = true;
    in_this_state_ = Duration{0};
  }
  return sleeps_;
}

}  // namespace headroom
