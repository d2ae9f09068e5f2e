#pragma once

#include <headroom/plan/schedule.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace headroom {

/// What to do with stages first..last, given their input and the gradient of their output: either
/// keep the first stage with an option and go on with the others, or sweep first..split-1 without
/// keeping, hold the input of `split` in a format, and do split..last before first..split-1.
struct Decision {
  static Decision keep(int option, std::int64_t rest_state = 0) {
    return {option, kNoSplit, 0, rest_state, 0};
  }
  static Decision sweep(int split, int format = 0, std::int64_t right_state = 0,
                        std::int64_t left_state = 0) {
    return {0, split, format, right_state, left_state};
  }

  static constexpr int kNoSplit = -1;

  int option;
  int split;   ///< kNoSplit: keep
  int format;  ///< of the input of `split`
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

/// The operations of a whole chain of `num_stages` stages, decided interval by interval, from all
/// stages with `state` on.
std::vector<Operation> expand_schedule(int num_stages, std::int64_t state, const Decide& decide);

}  // namespace headroom
