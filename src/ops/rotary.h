#pragma once

#include <headroom/ops/transformer.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace headroom::ops {

/// How fast each pair of channels turns, (head_size / 2) radians per position.
std::vector<float> rotary_frequencies(const RotaryOptions& options, std::int64_t head_size);

/// Cosines and sines of the angles of positions [first, first + length): (2, length, head_size / 2)
/// floats on the CPU, doubles when `like` is double, on the meta device when it is there. The same
/// bits for any number of threads.
at::Tensor rotary_table(const RotaryOptions& options, std::int64_t first, std::int64_t length,
                        std::int64_t head_size, const at::Tensor& like);

/// x (..., length, head_size) turned by a table, from LibTorch's own differentiable operations.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& table);

}  // namespace headroom::ops
