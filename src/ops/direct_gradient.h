#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace headroom {

/// A parameter's own gradient tensor, to be written to directly: no temporary of its size, no pass
/// to add it.
struct DirectGradient {
  at::Tensor gradient;
  bool is_new = false;  ///< not initialised: write, do not add
};

/// While the scope lives, the ops of this project write parameter gradients straight into .grad on
/// this thread, where autograd's own way is to return a temporary and add it. Only whoever runs a
/// whole backward that is meant to accumulate (the executor) may say so: under
/// torch::autograd::grad, say, .grad must not change.
class DirectGradientScope {
 public:
  /// Makes an uninitialised gradient for a parameter that has none.
  using Make = at::Tensor (*)(const at::Tensor& parameter);

  explicit DirectGradientScope(Make make);
  ~DirectGradientScope();
  DirectGradientScope(const DirectGradientScope&) = delete;
  DirectGradientScope& operator=(const DirectGradientScope&) = delete;

 private:
  Make before_;
};

/// For an op's backward: where to write the gradient of `parameter`; the op then returns an
/// undefined tensor for it. Nothing when there is no scope, or when `parameter` is no dense leaf
/// that requires grad: the op then returns the gradient as usual.
std::optional<DirectGradient> direct_gradient(const at::Tensor& parameter);

}  // namespace headroom
