#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// The Euclidean norm of all gradients taken together, summed in double and in an order that does
/// not depend on the number of threads. Not finite if and only if a gradient is not. Undefined
/// gradients are left out; sparse ones are supported. On the CPU it allocates next to nothing.
double global_norm(const std::vector<at::Tensor>& gradients);

/// The sum of the squares of one gradient, so that it need not stay for the norm of all; `scaled`
/// is the same of the values times 2^-600, for those whose squares overflow.
struct SquareSum {
  double plain = 0;
  double scaled = 0;
};
SquareSum square_sum(const at::Tensor& gradient);
/// Bit by bit the norm that the gradients together have, in this order.
double global_norm(const std::vector<SquareSum>& sums);

/// What gradients of this norm are multiplied with so that it becomes at most max_norm: min(1,
/// max_norm / (norm + 1e-6)), as in PyTorch. 1 when max_norm <= 0 (no clipping) or the norm is not
/// finite. Throws ConfigError when max_norm is not a number.
double clip_factor(double norm, double max_norm);

/// Scales the gradients in place so that their global norm is at most max_norm, and returns the
/// norm before. Call it once per update, on averaged (and unscaled) gradients. When the norm is not
/// finite nothing is changed: the caller skips the update.
double clip_global_norm(const std::vector<at::Tensor>& gradients, double max_norm);

/// The name of the first gradient that has a NaN or an infinity.
std::optional<std::string> first_non_finite(
    const std::vector<std::pair<std::string, at::Tensor>>& named_gradients);

}  // namespace headroom
