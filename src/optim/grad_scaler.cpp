#include <headroom/optim/grad_scaler.h>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <atomic>
#include <cmath>
#include <utility>

#include <headroom/core/error.h>
#include "optim/dense_floats.h"
#include "optim/update_kernels.h"

namespace headroom {
namespace {

/// Multiplies in place; false if anything is not finite.
bool scale_gradient(at::Tensor gradient, float factor) {
  if (gradient.is_sparse()) gradient = gradient._values();
  if (!are_dense_floats({&gradient})) {
    gradient.mul_(factor);
    return at::isfinite(gradient).all().item<bool>();
  }
  std::atomic<bool> finite{true};
  float* values = gradient.data_ptr<float>();
  for_ranges(gradient.numel(), [&](std::int64_t begin, std::int64_t end) {
    if (!optim_kernels::scale_and_check(factor, end - begin, values + begin)) finite = false;
  });
  return finite;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(options.enabled ? static_cast<float>(options.init_scale) : 1.0f) {
  if (!options.enabled) return;
  if (!(options.init_scale > 0) || !std::isfinite(scale_)) {
    throw ConfigError(
        fmt::format("init_scale must be a positive number, not {}", options.init_scale));
  }
  if (!(options.growth_factor > 1))
    throw ConfigError(fmt::format("growth_factor must be above 1, not {}", options.growth_factor));
  if (!(options.backoff_factor > 0 && options.backoff_factor < 1)) {
    throw ConfigError(
        fmt::format("backoff_factor must be between 0 and 1, not {}", options.backoff_factor));
  }
  if (options.growth_interval <= 0)
    throw ConfigError(
        fmt::format("growth_interval must be above 0, not {}", options.growth_interval));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  return options_.enabled ? loss * static_cast<double>(scale_) : loss;
}

bool GradScaler::unscale(const std::vector<at::Tensor>& gradients) {
  if (!options_.enabled) return true;
  if (unscaled_)
    throw Error(ExitCode::kInternal,
                "GradScaler::unscale() was called twice in one update; call update() in between");
  unscale_part(gradients);
  unscaled_ = true;
  overflow_ = std::exchange(overflow_in_part_, false);
  return !overflow_;
}

void GradScaler::unscale_part(const std::vector<at::Tensor>& gradients) {
  if (!options_.enabled) return;
  torch::NoGradGuard no_grad;
  const auto factor = static_cast<float>(1.0 / static_cast<double>(scale_));
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined() && !scale_gradient(gradient, factor)) overflow_in_part_ = true;
  }
}

bool GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) gradients.push_back(parameter.grad());
  }
  return unscale(gradients);
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (!unscaled_)
    throw Error(ExitCode::kInternal, "GradScaler::update() was called without unscale() before it");
  unscaled_ = false;
  if (overflow_) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
    growth_tracker_ = 0;
    ++num_skipped_;
  } else if (++growth_tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    growth_tracker_ = 0;
  }
}

void GradScaler::restore(const GradScalerState& state) {
  if (!(state.scale > 0) || !std::isfinite(state.scale)) {
    throw SnapshotError(
        fmt::format("the saved loss scale is {}, not a positive number", state.scale));
  }
  scale_ = static_cast<float>(state.scale);
  growth_tracker_ = state.growth_tracker;
  num_skipped_ = state.num_skipped;
  unscaled_ = overflow_in_part_ = false;
}

}  // namespace headroom
