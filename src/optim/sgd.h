#pragma once

#include <headroom/optim/optimizer.h>
#include <torch/arg.h>
#include "optim/optimizer_table.h"

namespace headroom {

/// As torch::optim::SGDOptions.
struct SGDOptions : optim_detail::LeanOptions<SGDOptions> {
  SGDOptions(double lr) : lr_(lr) {}  // NOLINT(google-explicit-constructor): as in LibTorch
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(double, dampening) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("lr", self.lr_);
    visit("momentum", self.momentum_);
    visit("dampening", self.dampening_);
    visit("weight_decay", self.weight_decay_);
    visit("nesterov", self.nesterov_);
  }
};

/// `step` counts the updates with momentum; `momentum_buffer` is undefined while momentum is 0.
struct SGDParamState : optim_detail::LeanParamStateOf<SGDParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("step", self.step_);
    visit("momentum_buffer", self.momentum_buffer_);
  }
};

/// Stochastic gradient descent with momentum, dampening, Nesterov's momentum and weight decay; the
/// formulas of torch::optim::SGD. State: nothing without momentum, else as many bytes as the
/// parameters.
class SGD : public LeanOptimizer {
 public:
  explicit SGD(std::vector<torch::optim::OptimizerParamGroup> param_groups, SGDOptions defaults);
  explicit SGD(std::vector<at::Tensor> parameters, SGDOptions defaults);
  const char* name() const override { return "sgd"; }

 protected:
  void check_options(const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_state(
      const at::Tensor& like, const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_empty_state() const override;
  void complete_state(const at::Tensor& like, LeanParamState& state,
                      const torch::optim::OptimizerOptions& options) const override;
  void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& state,
              const torch::optim::OptimizerOptions& options) const override;
};

/// Its row in the table of optimizers.
OptimizerRow sgd_row();

}  // namespace headroom
