#pragma once

#include <headroom/plan/schedule.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace headroom {

/// What to do with stages first..last, given a_{first-1} and the gradient of a_last: either keep
/// the first stage with an option and go on with the others, or sweep first..split-1 without
/// keeping, hold a_{split-1} in a format, and do split..last before first..split-1.
struct Decision {
  static Decision keep(int option, std::int64_t rest_state = 0) {
    return {option, 0, 0, rest_state, 0};
  }
  static Decision sweep(int split, int format = 0, std::int64_t right_state = 0,
                        std::int64_t left_state = 0) {
    return {0, split, format, right_state, left_state};
  }

  int option;
  int split;   ///< 0: keep
  int format;  ///< of a_{split-1}
  std::int64_t right_state;
  std::int64_t left_state;
};

/// Stages first..last whose input is held in `format`; `state` is whatever the decider passes on
/// (bytes left, snapshots left).
struct Interval {
  int first;
  int last;
  int format;
  std::int64_t state;
};
using Decide = std::function<Decision(const Interval&)>;

/// The operations of a whole chain of `num_stages` stages, decided interval by interval from {1,
/// num_stages, full, state}.
std::vector<Operation> expand_schedule(int num_stages, std::int64_t state, const Decide& decide);

}  // namespace headroom
