#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

namespace headroom {

/// `x` as `type`, by value as Tensor::to would give it: round to nearest even, NaN stays NaN.
/// Between float and bf16 or fp16 on the CPU it runs vectorised at memory speed. Keeps the strides
/// of a dense x. Not differentiable; always a new tensor.
at::Tensor convert(const at::Tensor& x, at::ScalarType type);

/// The same into `out`, which has the size of x; both contiguous.
void convert_out(const at::Tensor& x, const at::Tensor& out);

/// Tensors below this are kept as they are.
inline constexpr std::size_t kSmallestConvertedBytes = 4096;

/// Rounds x, contiguous floats on the CPU, to what `type` (bf16 or fp16) can hold, in place and in
/// one pass.
void round_to(const at::Tensor& x, at::ScalarType type);

/// While the scope lives, ops of this thread are told that what autograd keeps is kept in `type`.
/// They then recompute what they do not keep so that it is rounded as if it had been kept: every
/// option of a block gives the same bits.
class KeptTypeScope {
 public:
  explicit KeptTypeScope(std::optional<at::ScalarType> type);
  ~KeptTypeScope();
  KeptTypeScope(const KeptTypeScope&) = delete;
  KeptTypeScope& operator=(const KeptTypeScope&) = delete;

 private:
  std::optional<at::ScalarType> before_;
};
std::optional<at::ScalarType> kept_type();

}  // namespace headroom
