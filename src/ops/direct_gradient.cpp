#include "ops/direct_gradient.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

namespace headroom {
namespace {

thread_local DirectGradientScope::Make current_make = nullptr;

// The parameter itself. What a function saved can be another tensor on the same memory (under
// saved-tensor hooks it always is), but both lead to the same accumulator, and that knows whose
// gradient it accumulates.
at::Tensor original_of(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  const auto* node = dynamic_cast<const torch::autograd::AccumulateGrad*>(accumulator.get());
  return node == nullptr ? at::Tensor() : node->variable;
}

}  // namespace

DirectGradientScope::DirectGradientScope(Make make) : before_(current_make) { current_make = make; }
DirectGradientScope::~DirectGradientScope() { current_make = before_; }

std::optional<DirectGradient> direct_gradient(const at::Tensor& parameter) {
  if (current_make == nullptr || !parameter.defined() || !parameter.is_leaf() ||
      !parameter.requires_grad())
    return std::nullopt;
  if (at::GradMode::is_enabled())
    return std::nullopt;  // backward of a backward must see the gradient as a value
  const at::Tensor original = original_of(parameter);
  if (!original.defined()) return std::nullopt;
  const at::Tensor& gradient = original.grad();
  if (!gradient.defined()) {
    at::Tensor made = current_make(original);
    original.mutable_grad() = made;
    return DirectGradient{made, true};
  }
  if (!gradient.is_contiguous() || gradient.is_sparse() ||
      gradient.scalar_type() != parameter.scalar_type())
    return std::nullopt;
  return DirectGradient{gradient, false};
}

}  // namespace headroom
