#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace headroom {

struct CrossEntropyOptions {
  enum class Reduction { kMean, kSum };
  Reduction reduction = Reduction::kMean;
  std::int64_t ignore_index = -100;  ///< items with this target count for nothing
  at::Tensor item_weights;  ///< shape of targets; undefined: 1 each. A mean divides by their sum.
                            ///< Gets no gradient
  at::Tensor bias;          ///< (V), added to the logits; undefined: none. Gets its gradient
};

/// Cross-entropy of the logits hidden * weight^T + bias without making all the logits: hidden (...,
/// C), weight (V, C), targets (...) int64. Returns a scalar. As in PyTorch, the mean over no items
/// at all is NaN, and its gradients are 0.
///
/// On the CPU in float, logits exist for a few hundred rows at a time. Where gradients are wanted
/// they are made in forward, chunk by chunk, and kept instead of hidden and weight; backward hands
/// them out, times its incoming gradient. It can therefore run only once per forward. Throws
/// DataError for a target that is neither in [0, V) nor ignore_index.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets, const CrossEntropyOptions& options = {});

}  // namespace headroom
