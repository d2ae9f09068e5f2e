#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace headroom {

/// The parameters of all groups in order, each once.
std::vector<at::Tensor> unique_parameters(const torch::optim::Optimizer& optimizer);

/// The name of the first BatchNorm in training mode, with `prefix` before it.
std::optional<std::string> first_batch_norm(const torch::nn::Module& module,
                                            const std::string& prefix = {});

/// How messages call a parameter: by its name where it has one, else by its place and shape.
std::string describe_parameter(const std::string& name, std::size_t index,
                               const at::Tensor& parameter);

}  // namespace headroom
