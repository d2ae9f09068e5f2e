#pragma once

#include <cstdint>

// One-pass updates over contiguous floats. Each call works on its own range, so that callers split
// a tensor over threads as they like: an element's result does not depend on the split. No function
// allocates.

namespace headroom::optim_kernels {

/// One step of SGD: g += l2 * p; buffer = momentum * buffer + (1 - dampening) * g, or g in the
/// first step; p -= lr * direction.
struct SgdStep {
  float lr;
  float l2;
  float momentum;
  float one_minus_dampening;
  bool nesterov;
  bool first;
};
/// `buffer` is null without momentum.
void sgd_update(const SgdStep& step, std::int64_t count, float* parameter, const float* gradient,
                float* buffer);

/// One step of Adam or AdamW. `shrink` is 1 - lr * weight_decay for AdamW and 1 for Adam; `l2` the
/// other way round.
struct AdamStep {
  float shrink;
  float l2;
  float beta1;
  float beta2;
  float eps;
  float step_size;       ///< lr / (1 - beta1^t)
  float inv_root_bias2;  ///< 1 / sqrt(1 - beta2^t)
  float one_minus_beta1;
  float one_minus_beta2;
};
void adam_update(const AdamStep& step, std::int64_t count, float* parameter, const float* gradient,
                 float* exp_avg, float* exp_avg_sq);

/// Multiplies by `factor` in place; false if any product is infinite or not a number.
bool scale_and_check(float factor, std::int64_t count, float* values);

/// In double; the same bits on every instruction set.
double sum_of_squares(std::int64_t count, const float* values);

}  // namespace headroom::optim_kernels
