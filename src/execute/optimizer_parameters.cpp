#include "execute/optimizer_parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/optimizer.h>

#include <unordered_set>

namespace headroom {
namespace {

bool is_batch_norm(const torch::nn::Module& module) {
  return module.is_training() &&
         (dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
          dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
          dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr);
}

}  // namespace

std::vector<at::Tensor> unique_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  std::unordered_set<const void*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
    }
  }
  return parameters;
}

std::optional<std::string> first_batch_norm(const torch::nn::Module& module,
                                            const std::string& prefix) {
  if (is_batch_norm(module)) return prefix.empty() ? module.name() : prefix;
  for (const auto& child : module.named_modules(prefix, /*include_self=*/false)) {
    if (is_batch_norm(*child.value())) return child.key();
  }
  return std::nullopt;
}

std::string describe_parameter(const std::string& name, std::size_t index,
                               const at::Tensor& parameter) {
  if (!name.empty()) return fmt::format("parameter '{}'", name);
  return fmt::format("parameter {} of the optimizer (shape {})", index,
                     fmt::join(parameter.sizes(), "x"));
}

}  // namespace headroom
