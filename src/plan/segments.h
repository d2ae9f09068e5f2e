#pragma once

// How fixed policies cut a chain: one rule for plans and for checkpoint_sequential.

#include <cmath>
#include <cstdint>

namespace headroom {

/// Stages of each of `num_segments` segments but the last, which takes the rest: 2, 2, 2, 4 of 10,
/// as PyTorch's checkpoint_sequential cuts them. At most as many segments as stages.
constexpr std::int64_t segment_size(std::int64_t num_stages, std::int64_t num_segments) {
  return num_stages / num_segments;
}

/// Segments of the policy "sqrt".
inline std::int64_t num_sqrt_segments(std::int64_t num_stages) {
  return std::llround(std::sqrt(static_cast<double>(num_stages)));
}

/// Stages of the first half, by the policy "log": the larger half.
constexpr std::int64_t first_half(std::int64_t num_stages) { return (num_stages + 1) / 2; }

}  // namespace headroom
