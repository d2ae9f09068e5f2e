#pragma once

#include <headroom/optim/optimizer.h>
#include <torch/arg.h>
#include "optim/optimizer_table.h"

namespace headroom {

/// As torch::optim::AdamOptions and AdamWOptions, which differ in the default of weight decay;
/// amsgrad is refused.
template <bool kDecoupled>
struct AdamOptionsOf : optim_detail::LeanOptions<AdamOptionsOf<kDecoupled>> {
  AdamOptionsOf(double lr = 1e-3)
      : lr_(lr) {}  // NOLINT(google-explicit-constructor): as in LibTorch
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = kDecoupled ? 1e-2 : 0;
  TORCH_ARG(bool, amsgrad) = false;

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("lr", self.lr_);
    visit("betas", self.betas_);
    visit("eps", self.eps_);
    visit("weight_decay", self.weight_decay_);
    visit("amsgrad", self.amsgrad_);
  }
};
using AdamOptions = AdamOptionsOf<false>;
using AdamWOptions = AdamOptionsOf<true>;

/// The state of Adam and AdamW: `step` counts updates, the moments have the parameter's sizes and
/// type.
struct AdamParamState : optim_detail::LeanParamStateOf<AdamParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("step", self.step_);
    visit("exp_avg", self.exp_avg_);
    visit("exp_avg_sq", self.exp_avg_sq_);
  }
};

/// Adam with the formulas of torch::optim::Adam: weight decay is added to the gradient. Or AdamW
/// with those of torch::optim::AdamW: weight decay shrinks the parameter directly. State: 8 bytes
/// per float parameter.
template <bool kDecoupled>
class AdamOf : public LeanOptimizer {
 public:
  using Options = AdamOptionsOf<kDecoupled>;
  explicit AdamOf(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                  Options defaults = {});
  explicit AdamOf(std::vector<at::Tensor> parameters, Options defaults = {});
  const char* name() const override { return kDecoupled ? "adamw" : "adam"; }

 protected:
  void check_options(const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_state(
      const at::Tensor& like, const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_empty_state() const override;
  void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& state,
              const torch::optim::OptimizerOptions& options) const override;
};
using Adam = AdamOf<false>;
using AdamW = AdamOf<true>;
extern template class AdamOf<false>;
extern template class AdamOf<true>;

/// Their rows in the table of optimizers.
OptimizerRow adam_row();
OptimizerRow adamw_row();

}  // namespace headroom
