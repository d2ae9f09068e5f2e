#pragma once

#include <cstdint>

#include "optim/update_kernels.h"

namespace headroom::optim_kernels {

/// Elements that share a scale.
inline constexpr std::int64_t kQuantizedBlock = 256;
inline constexpr std::int64_t num_blocks(std::int64_t count) {
  return (count + kQuantizedBlock - 1) / kQuantizedBlock;
}

/// The moments of a range that starts at a block.
struct QuantizedMoments {
  std::int8_t* exp_avg_codes;
  float* exp_avg_scales;
  std::uint8_t* root_sq_codes;
  float* root_sq_scales;
};

/// One step of AdamW on `count` elements from `first` on, which is a multiple of kQuantizedBlock.
/// All pointers are to the whole tensor. `step_index` and the position of an element decide which
/// way its second moment is rounded.
void adamw_8bit_update(const AdamStep& step, std::uint32_t step_index, std::int64_t first,
                       std::int64_t count, float* parameter, const float* gradient,
                       const QuantizedMoments& moments);

}  // namespace headroom::optim_kernels
