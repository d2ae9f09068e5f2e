#pragma once

#include <ATen/core/Tensor.h>

namespace headroom {

/// token_weight[tokens] + position_weight[0..T): tokens (B, T) int64, token_weight (V, C),
/// position_weight (>= T, C), which may be undefined: nothing is added. Returns (B, T, C). Values
/// and gradients do not depend on the number of threads. Throws DataError for a token outside of
/// [0, V).
at::Tensor token_position_embedding(const at::Tensor& tokens, const at::Tensor& token_weight,
                                    const at::Tensor& position_weight);

}  // namespace headroom
