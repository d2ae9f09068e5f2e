#include "optim/adamw_8bit.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>

#include <headroom/core/error.h>
#include "optim/adam_step.h"
#include "optim/dense_floats.h"
#include "optim/options_as.h"
#include "optim/parameter_groups.h"
#include "optim/quantized_kernels.h"
#include "optim/zeroed_state.h"

namespace headroom {
namespace {

void update_quantized(const optim_kernels::AdamStep& step, at::Tensor& parameter,
                      const at::Tensor& gradient, AdamW8bitParamState& state) {
  const optim_kernels::QuantizedMoments moments{
      state.exp_avg_codes().data_ptr<std::int8_t>(), state.exp_avg_scales().data_ptr<float>(),
      state.root_sq_codes().data_ptr<std::uint8_t>(), state.root_sq_scales().data_ptr<float>()};
  float* p = parameter.data_ptr<float>();
  const float* g = gradient.data_ptr<float>();
  const std::int64_t count = parameter.numel();
  constexpr std::int64_t kBlock = optim_kernels::kQuantizedBlock;
  parallel_for(0, optim_kernels::num_blocks(count), kElementsPerTask / kBlock,
               [&](std::int64_t begin, std::int64_t end) {
                 const std::int64_t first = begin * kBlock;
                 const std::int64_t last = std::min(end * kBlock, count);
                 optim_kernels::adamw_8bit_update(step, static_cast<std::uint32_t>(state.step()),
                                                  first, last - first, p, g, moments);
               });
}

void update_fp32(const optim_kernels::AdamStep& step, at::Tensor& parameter,
                 const at::Tensor& gradient, AdamW8bitParamState& state) {
  float* p = parameter.data_ptr<float>();
  const float* g = gradient.data_ptr<float>();
  float* m = state.exp_avg().data_ptr<float>();
  float* v = state.exp_avg_sq().data_ptr<float>();
  for_ranges(parameter.numel(), [&](std::int64_t begin, std::int64_t end) {
    optim_kernels::adam_update(step, end - begin, p + begin, g + begin, m + begin, v + begin);
  });
}

std::unique_ptr<LeanOptimizer> make_by_config(const OptimizerConfig& config,
                                              const NamedParameters& named,
                                              const KeepFp32State& keep_fp32_state) {
  return make_grouped<AdamW8bit>(split_parameters(config, named, keep_fp32_state), config,
                                 adam_options<AdamW8bitOptions>(config),
                                 [](AdamW8bitOptions& options) {
                                   options.min_8bit_size(std::numeric_limits<std::int64_t>::max());
                                 });
}

std::int64_t state_bytes(const OptimizerConfig& /*config*/,
                         const std::vector<std::int64_t>& shape) {
  constexpr std::int64_t kFloatBytes = sizeof(float);
  const std::int64_t count = float_bytes(shape) / kFloatBytes;
  if (count < kMin8bitSize) return 2 * count * kFloatBytes;
  return 2 * count + 2 * kFloatBytes * optim_kernels::num_blocks(count);
}

}  // namespace

AdamW8bit::AdamW8bit(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                     AdamW8bitOptions defaults)
    : LeanOptimizer(std::move(param_groups), std::make_unique<AdamW8bitOptions>(defaults)) {
  AdamW8bit::check_options(defaults);
  check_all_options();
}

AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions defaults)
    : AdamW8bit(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(
                    std::move(parameters))},
                std::move(defaults)) {}

void AdamW8bit::check_options(const torch::optim::OptimizerOptions& base) const {
  const auto& options = options_as<AdamW8bitOptions>(base, *this);
  check_adam_numbers(options.lr(), options.betas(), options.eps(), options.weight_decay(),
                     /*amsgrad=*/false);
}

void AdamW8bit::check_parameter(const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  if (parameter.is_contiguous() &&
      are_dense_floats({&parameter, gradient.defined() ? &gradient : &parameter}))
    return;
  throw ConfigError(
      fmt::format("adamw_8bit takes contiguous float parameters and gradients on the CPU, not {} "
                  "on {}; use adamw or adafactor",
                  c10::toString(parameter.scalar_type()), parameter.device().str()));
}

std::unique_ptr<LeanParamState> AdamW8bit::make_state(
    const at::Tensor& like, const torch::optim::OptimizerOptions& options) const {
  auto state = std::make_unique<AdamW8bitParamState>();
  if (like.numel() < static_cast<const AdamW8bitOptions&>(options).min_8bit_size()) {
    state->exp_avg(zeroed_like(like));
    state->exp_avg_sq(zeroed_like(like));
    return state;
  }
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(like.device());
  const std::int64_t blocks = optim_kernels::num_blocks(like.numel());
  state->exp_avg_codes(zeroed({like.numel()}, floats.dtype(at::kChar)));
  state->exp_avg_scales(zeroed({blocks}, floats));
  state->root_sq_codes(zeroed({like.numel()}, floats.dtype(at::kByte)));
  state->root_sq_scales(zeroed({blocks}, floats));
  return state;
}

std::unique_ptr<LeanParamState> AdamW8bit::make_empty_state() const {
  return std::make_unique<AdamW8bitParamState>();
}

void AdamW8bit::update(at::Tensor& parameter, const at::Tensor& gradient,
                       LeanParamState& base_state,
                       const torch::optim::OptimizerOptions& base_options) const {
  const auto& options = static_cast<const AdamW8bitOptions&>(base_options);
  auto& state = static_cast<AdamW8bitParamState&>(base_state);
  state.step(state.step() + 1);
  const auto step = adam_step(options.lr(), options.betas(), options.eps(), options.weight_decay(),
                              /*decoupled=*/true, state.step());
  if (state.exp_avg_codes().defined()) {
    update_quantized(step, parameter, gradient, state);
  } else {
    update_fp32(step, parameter, gradient, state);
  }
  parameter.unsafeGetTensorImpl()->bump_version();
}

OptimizerRow adamw_8bit_row() {
  return {"adamw_8bit", "two moments in 8 bits", make_by_config, state_bytes};
}

}  // namespace headroom
