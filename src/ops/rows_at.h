#pragma once

#include <ATen/core/Tensor.h>

namespace headroom {

/// x[b, positions[b, k]] for every b and k: x (B, T, C), positions (B, K) int64. Returns (B * K,
/// C). Keeps the positions alone. Throws DataError for a position outside of [0, T).
at::Tensor rows_at(const at::Tensor& x, const at::Tensor& positions);

}  // namespace headroom
