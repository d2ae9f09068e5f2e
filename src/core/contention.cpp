#include "core/contention.h"

#include <algorithm>
#include <cmath>

namespace headroom {

ThreadConduct ContentionPolicy::decide(const ContentionWindow& window) {
  in_this_state_ += window.length;
  reviewed_ += window.length;
  lost_ += window.lost;
  used_by_others_ += window.cores_of_others * window.length;
  idle_left_ += window.idle_share_left * window.length;
  const bool is_very_busy = !conduct_.sleeps && window.lost > kVeryBusyShare * window.length;
  // The others may have begun within the first such window; the second one shows what they take.
  if (is_very_busy && was_very_busy_) enter({true, cores_to_gather_on(window.cores_of_others)});
  was_very_busy_ = is_very_busy;
  if (reviewed_ + window.length / 2 >= kReview) review();
  return conduct_;
}

void ContentionPolicy::enter(ThreadConduct conduct) {
  conduct_ = conduct;
  in_this_state_ = Duration{0};
  forget();
}

void ContentionPolicy::forget() { reviewed_ = lost_ = used_by_others_ = idle_left_ = Duration{0}; }

void ContentionPolicy::review() {
  if (!conduct_.sleeps) {
    // What was busy has ended: the next time is a new one.
    if (in_this_state_ > kShortestSleep) next_sleep_ = kShortestSleep;
    if (lost_ > kBusyShare * reviewed_)
      return enter({true, cores_to_gather_on(used_by_others_ / reviewed_)});
  } else if (conduct_.num_cores > 0) {
    if (idle_left_ > kIdleShare * reviewed_) return enter({});
  } else if (in_this_state_ + kReview / 2 >= next_sleep_) {
    next_sleep_ = std::min(2 * next_sleep_, kLongestSleep);
    return enter({});
  }
  forget();
}

int ContentionPolicy::cores_to_gather_on(double cores_of_others) const {
  // Who competes with threads of ours for one core has half of it.
  constexpr double kRoundedDown = 0.3;
  const int available =
      num_cores_ - static_cast<int>(std::ceil(std::max(0.0, cores_of_others - kRoundedDown)));
  // With more than half of the cores, the system shares them out better than a fixed choice.
  if (num_threads_ < 2 || 2 * available > num_threads_) return 0;
  return std::max(1, available);
}

}  // namespace headroom
