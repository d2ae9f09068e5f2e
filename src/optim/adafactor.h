#pragma once

#include <headroom/optim/optimizer.h>
#include <torch/arg.h>
#include "optim/optimizer_table.h"

namespace headroom {

/// Names, defaults and meaning of Hugging Face's Adafactor. `AdafactorOptions()` chooses its own
/// rate, min(1e-2, 1/sqrt(t)) times the parameter's root mean square; `AdafactorOptions(lr)` has a
/// fixed rate, to be used with .scale_parameter(false) for a plain one.
struct AdafactorOptions : optim_detail::LeanOptions<AdafactorOptions> {
  AdafactorOptions() = default;
  AdafactorOptions(double lr)
      : lr_(lr), relative_step_(false) {}  // NOLINT(google-explicit-constructor): as in LibTorch
  using eps_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 0;  ///< not used with relative_step
  TORCH_ARG(eps_t, eps) =
      std::make_tuple(1e-30, 1e-3);  ///< added to the squared gradient; least scale of a parameter
  TORCH_ARG(double,
            clip_threshold) = 1.0;  ///< largest root mean square of an update, before the rate
  TORCH_ARG(double,
            decay_rate) = -0.8;  ///< the second moment's decay at update t is 1 - t^decay_rate
  TORCH_ARG(double, beta1) = 0;  ///< above 0: keep a first moment, 4 bytes per parameter
  TORCH_ARG(double, weight_decay) = 0;  ///< of the parameter itself, times the rate
  TORCH_ARG(bool,
            scale_parameter) = true;      ///< multiply the rate by the parameter's root mean square
  TORCH_ARG(bool, relative_step) = true;  ///< a rate of its own instead of lr
  TORCH_ARG(bool, warmup_init) = false;   ///< with relative_step: start at 1e-6 * t

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("lr", self.lr_);
    visit("eps", self.eps_);
    visit("clip_threshold", self.clip_threshold_);
    visit("decay_rate", self.decay_rate_);
    visit("beta1", self.beta1_);
    visit("weight_decay", self.weight_decay_);
    visit("scale_parameter", self.scale_parameter_);
    visit("relative_step", self.relative_step_);
    visit("warmup_init", self.warmup_init_);
  }
};

/// A parameter of two dimensions or more is a matrix (size(0), rest): it has a second moment per
/// row and per column. Others have the full one.
struct AdafactorParamState : optim_detail::LeanParamStateOf<AdafactorParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg_sq_row);  // (rows)
  TORCH_ARG(at::Tensor, exp_avg_sq_col);  // (columns)
  TORCH_ARG(at::Tensor, exp_avg_sq);      // the parameter's sizes
  TORCH_ARG(at::Tensor, exp_avg);         // the parameter's sizes, with beta1 only

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("step", self.step_);
    visit("exp_avg_sq_row", self.exp_avg_sq_row_);
    visit("exp_avg_sq_col", self.exp_avg_sq_col_);
    visit("exp_avg_sq", self.exp_avg_sq_);
    visit("exp_avg", self.exp_avg_);
  }
};

/// Adafactor (Shazeer and Stern, 2018) with a factored second moment: state of rows + columns
/// floats for a matrix. Convolution weights are factored as (output channels, rest), which the
/// paper leaves open. Float parameters on the CPU need less than 1 MiB of scratch space.
class Adafactor : public LeanOptimizer {
 public:
  explicit Adafactor(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                     AdafactorOptions defaults = {});
  explicit Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults = {});
  const char* name() const override { return "adafactor"; }

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
OptimizerRow adafactor_row();

}  // namespace headroom
