#pragma once

// How fixed policies cut a chain: one rule for plans and for checkpoint_sequential.

#include <cmath>
#include <cstdint>

namespace headroom {

/// The first stage, from 0, of segment number `segment`, from 0: sizes differ by one at most, since
/// the largest segment makes the peak. 10 stages in 4 segments are 2, 3, 2, 3. At most as many
/// segments as stages; the segment after the last begins at num_stages.
constexpr std::int64_t segment_begin(std::int64_t num_stages, std::int64_t num_segments,
                                     std::int64_t segment) {
  return segment * num_stages / num_segments;
}

/// The segment that has this stage, both from 0.
constexpr std::int64_t segment_of(std::int64_t num_stages, std::int64_t num_segments,
                                  std::int64_t stage) {
  return ((stage + 1) * num_segments - 1) / num_stages;
}

/// Segments of the policy "sqrt".
inline std::int64_t num_sqrt_segments(std::int64_t num_stages) {
  return std::llround(std::sqrt(static_cast<double>(num_stages)));
}

/// Stages of the first half, by the policy "log": the larger half.
constexpr std::int64_t first_half(std::int64_t num_stages) { return (num_stages + 1) / 2; }

}  // namespace headroom
