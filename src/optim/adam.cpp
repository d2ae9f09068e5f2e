#include "optim/adam.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <headroom/core/error.h>
#include "optim/adam_step.h"
#include "optim/dense_floats.h"
#include "optim/options_as.h"
#include "optim/parameter_groups.h"
#include "optim/zeroed_state.h"

namespace headroom {
namespace {

template <typename Options>
void update_plainly(at::Tensor& parameter, const at::Tensor& gradient, AdamParamState& state,
                    const Options& options, bool decoupled) {
  const auto [beta1, beta2] = options.betas();
  const double bias1 = 1 - std::pow(beta1, static_cast<double>(state.step()));
  const double bias2 = 1 - std::pow(beta2, static_cast<double>(state.step()));
  at::Tensor g = gradient;
  if (options.weight_decay() != 0 && decoupled)
    parameter.mul_(1 - options.lr() * options.weight_decay());
  if (options.weight_decay() != 0 && !decoupled)
    g = gradient.add(parameter, options.weight_decay());
  state.exp_avg().mul_(beta1).add_(g, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(g, g, 1 - beta2);
  const at::Tensor denominator = (state.exp_avg_sq().sqrt() / std::sqrt(bias2)).add_(options.eps());
  parameter.addcdiv_(state.exp_avg(), denominator, -options.lr() / bias1);
}

template <typename Options>
void update_adam(at::Tensor& parameter, const at::Tensor& gradient, AdamParamState& state,
                 const Options& options, bool decoupled) {
  state.step(state.step() + 1);
  if (!are_dense_floats({&parameter, &gradient, &state.exp_avg(), &state.exp_avg_sq()})) {
    return update_plainly(parameter, gradient, state, options, decoupled);
  }
  const auto step = adam_step(options.lr(), options.betas(), options.eps(), options.weight_decay(),
                              decoupled, state.step());
  float* p = parameter.data_ptr<float>();
  const float* g = gradient.data_ptr<float>();
  float* m = state.exp_avg().template data_ptr<float>();
  float* v = state.exp_avg_sq().template data_ptr<float>();
  for_ranges(parameter.numel(), [&](std::int64_t begin, std::int64_t end) {
    optim_kernels::adam_update(step, end - begin, p + begin, g + begin, m + begin, v + begin);
  });
  parameter.unsafeGetTensorImpl()->bump_version();
}

std::vector<torch::optim::OptimizerParamGroup> one_group(std::vector<at::Tensor> parameters) {
  return {torch::optim::OptimizerParamGroup(std::move(parameters))};
}

std::int64_t two_moments_bytes(const OptimizerConfig& /*config*/,
                               const std::vector<std::int64_t>& shape) {
  return 2 * float_bytes(shape);
}

}  // namespace

void check_adam_numbers(double lr, const std::tuple<double, double>& betas, double eps,
                        double weight_decay, bool amsgrad) {
  if (!(lr >= 0))
    throw ConfigError(fmt::format("the learning rate must be at least 0, not {}", lr));
  if (!(eps >= 0)) throw ConfigError(fmt::format("eps must be at least 0, not {}", eps));
  for (const double beta : {std::get<0>(betas), std::get<1>(betas)}) {
    if (!(beta >= 0 && beta < 1))
      throw ConfigError(fmt::format("betas must be at least 0 and below 1, not {}", beta));
  }
  if (!(weight_decay >= 0))
    throw ConfigError(fmt::format("the weight decay must be at least 0, not {}", weight_decay));
  if (amsgrad)
    throw ConfigError(
        "amsgrad is not offered: it keeps a third state of 4 bytes per parameter; use torch::optim "
        "for it");
}

template <bool kDecoupled>
AdamOf<kDecoupled>::AdamOf(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                           Options defaults)
    : LeanOptimizer(std::move(param_groups), std::make_unique<Options>(defaults)) {
  AdamOf::check_options(defaults);
  check_all_options();
}

template <bool kDecoupled>
AdamOf<kDecoupled>::AdamOf(std::vector<at::Tensor> parameters, Options defaults)
    : AdamOf(one_group(std::move(parameters)), std::move(defaults)) {}

template <bool kDecoupled>
void AdamOf<kDecoupled>::check_options(const torch::optim::OptimizerOptions& base) const {
  const auto& options = options_as<Options>(base, *this);
  check_adam_numbers(options.lr(), options.betas(), options.eps(), options.weight_decay(),
                     options.amsgrad());
}

template <bool kDecoupled>
std::unique_ptr<LeanParamState> AdamOf<kDecoupled>::make_state(
    const at::Tensor& like, const torch::optim::OptimizerOptions& /*options*/) const {
  auto state = std::make_unique<AdamParamState>();
  state->exp_avg(zeroed_like(like));
  state->exp_avg_sq(zeroed_like(like));
  return state;
}

template <bool kDecoupled>
std::unique_ptr<LeanParamState> AdamOf<kDecoupled>::make_empty_state() const {
  return std::make_unique<AdamParamState>();
}

template <bool kDecoupled>
void AdamOf<kDecoupled>::update(at::Tensor& parameter, const at::Tensor& gradient,
                                LeanParamState& state,
                                const torch::optim::OptimizerOptions& options) const {
  update_adam(parameter, gradient, static_cast<AdamParamState&>(state),
              static_cast<const Options&>(options), kDecoupled);
}

template class AdamOf<false>;
template class AdamOf<true>;

OptimizerRow adam_row() {
  return {"adam", "two moments in fp32",
          [](const OptimizerConfig& config, const NamedParameters& named, const KeepFp32State&) {
            return make_grouped<Adam>(config, named, adam_options<AdamOptions>(config));
          },
          two_moments_bytes, /*has_independent_elements=*/true};
}

OptimizerRow adamw_row() {
  return {"adamw", "two moments in fp32",
          [](const OptimizerConfig& config, const NamedParameters& named, const KeepFp32State&) {
            return make_grouped<AdamW>(config, named, adam_options<AdamWOptions>(config));
          },
          two_moments_bytes, /*has_independent_elements=*/true};
}

}  // namespace headroom
