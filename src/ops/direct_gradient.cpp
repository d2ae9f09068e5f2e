#include <headroom/ops/direct_gradient.h>

#include <torch/types.h>

namespace headroom {
namespace {

thread_local DirectGradientScope::Make current_make = nullptr;

}  // namespace

DirectGradientScope::DirectGradientScope(Make make) : before_(current_make) { current_make = make; }
DirectGradientScope::~DirectGradientScope() { current_make = before_; }

std::optional<DirectGradient> direct_gradient(const at::Tensor& parameter) {
  if (current_make == nullptr || !parameter.defined() || !parameter.is_leaf() || !parameter.requires_grad()) return std::nullopt;
  if (at::GradMode::is_enabled()) return std::nullopt;  // backward of a backward must see the gradient as a value
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) {
    at::Tensor made = current_make(parameter);
    parameter.mutable_grad() = made;
    return DirectGradient{made, true};
  }
  if (!gradient.is_contiguous() || gradient.is_sparse() || gradient.scalar_type() != parameter.scalar_type()) return std::nullopt;
  return DirectGradient{gradient, false};
}

}  // namespace headroom
