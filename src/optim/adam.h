#pragma once

#include <headroom/optim/optimizer.h>
#include <torch/arg.h>
#include "optim/optimizer_table.h"

namespace headroom {

/// As torch::optim::AdamOptions; amsgrad is refused.
struct AdamOptions : optim_detail::LeanOptions<AdamOptions> {
  AdamOptions(double lr = 1e-3) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as in LibTorch
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
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

/// As torch::optim::AdamWOptions; amsgrad is refused.
struct AdamWOptions : optim_detail::LeanOptions<AdamWOptions> {
  AdamWOptions(double lr = 1e-3)
      : lr_(lr) {}  // NOLINT(google-explicit-constructor): as in LibTorch
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
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

/// Adam with the formulas of torch::optim::Adam: weight decay is added to the gradient. State: 8
/// bytes per float parameter.
class Adam : public LeanOptimizer {
 public:
  explicit Adam(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                AdamOptions defaults = {});
  explicit Adam(std::vector<at::Tensor> parameters, AdamOptions defaults = {});
  const char* name() const override { return "adam"; }

 protected:
  void check_options(const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_state(
      const at::Tensor& like, const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_empty_state() const override;
  void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& state,
              const torch::optim::OptimizerOptions& options) const override;
};

/// AdamW with the formulas of torch::optim::AdamW: weight decay shrinks the parameter directly.
/// State: 8 bytes per float parameter.
class AdamW : public LeanOptimizer {
 public:
  explicit AdamW(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                 AdamWOptions defaults = {});
  explicit AdamW(std::vector<at::Tensor> parameters, AdamWOptions defaults = {});
  const char* name() const override { return "adamw"; }

 protected:
  void check_options(const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_state(
      const at::Tensor& like, const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_empty_state() const override;
  void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& state,
              const torch::optim::OptimizerOptions& options) const override;
};

/// Their rows in the table of optimizers.
OptimizerRow adam_row();
OptimizerRow adamw_row();

}  // namespace headroom
