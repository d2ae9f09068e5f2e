#pragma once

#include <cmath>
#include <cstdint>
#include <tuple>

#include <headroom/optim/optimizer.h>
#include "optim/update_kernels.h"

namespace headroom {

/// The numbers of update `step` (from 1), computed in double as LibTorch does. Weight decay goes to
/// the gradient or to the parameter.
inline optim_kernels::AdamStep adam_step(double lr, const std::tuple<double, double>& betas,
                                         double eps, double weight_decay, bool decoupled,
                                         std::int64_t step) {
  const auto [beta1, beta2] = betas;
  const double bias1 = 1 - std::pow(beta1, static_cast<double>(step));
  const double bias2 = 1 - std::pow(beta2, static_cast<double>(step));
  optim_kernels::AdamStep numbers{};
  numbers.shrink = static_cast<float>(decoupled ? 1 - lr * weight_decay : 1.0);
  numbers.l2 = static_cast<float>(decoupled ? 0.0 : weight_decay);
  numbers.beta1 = static_cast<float>(beta1);
  numbers.beta2 = static_cast<float>(beta2);
  numbers.eps = static_cast<float>(eps);
  numbers.step_size = static_cast<float>(lr / bias1);
  numbers.inv_root_bias2 = static_cast<float>(1 / std::sqrt(bias2));
  numbers.one_minus_beta1 = static_cast<float>(1 - beta1);
  numbers.one_minus_beta2 = static_cast<float>(1 - beta2);
  return numbers;
}

/// The options of Adam and its variants from the words of the command line.
template <typename Options>
Options adam_options(const OptimizerConfig& config) {
  return Options(config.learning_rate)
      .betas({config.beta1, config.beta2})
      .eps(config.eps)
      .weight_decay(config.weight_decay);
}

/// Throws ConfigError on numbers that Adam cannot work with, and on amsgrad.
void check_adam_numbers(double lr, const std::tuple<double, double>& betas, double eps,
                        double weight_decay, bool amsgrad);

}  // namespace headroom
