#include "optim/sgd.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <headroom/core/error.h>
#include "optim/dense_floats.h"
#include "optim/options_as.h"
#include "optim/parameter_groups.h"
#include "optim/update_kernels.h"
#include "optim/zeroed_state.h"

namespace headroom {
namespace {

void update_plainly(at::Tensor& parameter, const at::Tensor& gradient, SGDParamState& state,
                    const SGDOptions& options) {
  at::Tensor direction =
      options.weight_decay() != 0 ? gradient.add(parameter, options.weight_decay()) : gradient;
  if (options.momentum() != 0) {
    at::Tensor& buffer = state.momentum_buffer();
    if (state.step() == 0) {
      buffer.copy_(direction);
    } else {
      buffer.mul_(options.momentum()).add_(direction, 1 - options.dampening());
    }
    direction = options.nesterov() ? direction.add(buffer, options.momentum()) : buffer;
  }
  parameter.add_(direction, -options.lr());
}

}  // namespace

SGD::SGD(std::vector<torch::optim::OptimizerParamGroup> param_groups, SGDOptions defaults)
    : LeanOptimizer(std::move(param_groups), std::make_unique<SGDOptions>(defaults)) {
  SGD::check_options(defaults);
  check_all_options();
}

SGD::SGD(std::vector<at::Tensor> parameters, SGDOptions defaults)
    : SGD(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(
              std::move(parameters))},
          std::move(defaults)) {}

void SGD::check_options(const torch::optim::OptimizerOptions& base) const {
  const auto& options = options_as<SGDOptions>(base, *this);
  if (!(options.lr() >= 0))
    throw ConfigError(fmt::format("the learning rate must be at least 0, not {}", options.lr()));
  if (!(options.momentum() >= 0))
    throw ConfigError(fmt::format("the momentum must be at least 0, not {}", options.momentum()));
  if (!(options.weight_decay() >= 0))
    throw ConfigError(
        fmt::format("the weight decay must be at least 0, not {}", options.weight_decay()));
  if (options.nesterov() && (options.momentum() <= 0 || options.dampening() != 0)) {
    throw ConfigError("Nesterov's momentum needs a momentum above 0 and no dampening");
  }
}

std::unique_ptr<LeanParamState> SGD::make_state(
    const at::Tensor& like, const torch::optim::OptimizerOptions& options) const {
  auto state = std::make_unique<SGDParamState>();
  complete_state(like, *state, options);
  return state;
}

void SGD::complete_state(const at::Tensor& like, LeanParamState& base,
                         const torch::optim::OptimizerOptions& options) const {
  auto& state = static_cast<SGDParamState&>(base);
  if (static_cast<const SGDOptions&>(options).momentum() != 0 && !state.momentum_buffer().defined())
    state.momentum_buffer(zeroed_like(like));
}

std::unique_ptr<LeanParamState> SGD::make_empty_state() const {
  return std::make_unique<SGDParamState>();
}

void SGD::update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& base_state,
                 const torch::optim::OptimizerOptions& base_options) const {
  const auto& options = static_cast<const SGDOptions&>(base_options);
  auto& state = static_cast<SGDParamState&>(base_state);
  const bool with_momentum = options.momentum() != 0;
  if (!are_dense_floats(
          {&parameter, &gradient, with_momentum ? &state.momentum_buffer() : &parameter})) {
    update_plainly(parameter, gradient, state, options);
  } else {
    const optim_kernels::SgdStep step{static_cast<float>(options.lr()),
                                      static_cast<float>(options.weight_decay()),
                                      static_cast<float>(options.momentum()),
                                      static_cast<float>(1 - options.dampening()),
                                      options.nesterov(),
                                      state.step() == 0};
    float* p = parameter.data_ptr<float>();
    const float* g = gradient.data_ptr<float>();
    float* buffer = with_momentum ? state.momentum_buffer().data_ptr<float>() : nullptr;
    for_ranges(parameter.numel(), [&](std::int64_t begin, std::int64_t end) {
      optim_kernels::sgd_update(step, end - begin, p + begin, g + begin,
                                buffer == nullptr ? nullptr : buffer + begin);
    });
    parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (with_momentum) state.step(state.step() + 1);
}

OptimizerRow sgd_row() {
  return {"sgd", "nothing, or with momentum a copy of the weights",
          [](const OptimizerConfig& config, const NamedParameters& named, const KeepFp32State&) {
            return make_grouped<SGD>(config, named,
                                     SGDOptions(config.learning_rate)
                                         .momentum(config.momentum)
                                         .weight_decay(config.weight_decay));
          },
          [](const OptimizerConfig& config, const std::vector<std::int64_t>& shape) {
            return config.momentum != 0 ? float_bytes(shape) : 0;
          },
          /*has_independent_elements=*/true};
}

}  // namespace headroom
