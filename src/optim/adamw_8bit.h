#pragma once

#include <headroom/optim/optimizer.h>
#include <torch/arg.h>
#include "optim/optimizer_table.h"

namespace headroom {

/// Parameters with fewer elements keep fp32 moments, unless told otherwise.
inline constexpr std::int64_t kMin8bitSize = 4096;

/// As AdamWOptions, and which parameters keep their moments in fp32.
struct AdamW8bitOptions : optim_detail::LeanOptions<AdamW8bitOptions> {
  AdamW8bitOptions(double lr = 1e-3)
      : lr_(lr) {}  // NOLINT(google-explicit-constructor): as in LibTorch
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// Parameters with fewer elements keep fp32 moments: biases and norms cost little and suffer
  /// most. The largest value of int64 keeps all of a group in fp32 (embeddings, where wanted).
  TORCH_ARG(std::int64_t, min_8bit_size) = kMin8bitSize;

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("lr", self.lr_);
    visit("betas", self.betas_);
    visit("eps", self.eps_);
    visit("weight_decay", self.weight_decay_);
    visit("min_8bit_size", self.min_8bit_size_);
  }
};

/// Either the four 8-bit tensors or the two fp32 moments.
struct AdamW8bitParamState : optim_detail::LeanParamStateOf<AdamW8bitParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg_codes);   // (numel) int8: the first moment
  TORCH_ARG(at::Tensor, exp_avg_scales);  // (blocks) floats: the largest magnitude in each block
  TORCH_ARG(at::Tensor, root_sq_codes);   // (numel) uint8: the root of the second moment
  TORCH_ARG(at::Tensor, root_sq_scales);  // (blocks) floats
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("step", self.step_);
    visit("exp_avg_codes", self.exp_avg_codes_);
    visit("exp_avg_scales", self.exp_avg_scales_);
    visit("root_sq_codes", self.root_sq_codes_);
    visit("root_sq_scales", self.root_sq_scales_);
    visit("exp_avg", self.exp_avg_);
    visit("exp_avg_sq", self.exp_avg_sq_);
  }
};

/// AdamW with both moments in 8 bits: 2 + 8/256 bytes of state per parameter.
///
/// Blocks of 256 elements share a scale, the block's largest magnitude, which is itself exact.
/// Within a block the codes are dynamic: a code stands for its square, so that steps are finest,
/// relative to the value, near the largest, and values 4 decades smaller are still told apart. The
/// second moment is stored as its root, which is what the update divides by. Values are rounded up
/// or down interleaved, up the more often the nearer (by a sequence of step and position, without
/// random state): rounding to the nearest would freeze moments that one update moves by less than
/// half a step. The update itself uses the moments before they are rounded.
///
/// Takes contiguous float parameters on the CPU; throws ConfigError for others. Deterministic,
/// whatever the number of threads.
class AdamW8bit : public LeanOptimizer {
 public:
  explicit AdamW8bit(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                     AdamW8bitOptions defaults = {});
  explicit AdamW8bit(std::vector<at::Tensor> parameters, AdamW8bitOptions defaults = {});
  const char* name() const override { return "adamw_8bit"; }

 protected:
  void check_options(const torch::optim::OptimizerOptions& options) const override;
  void check_parameter(const at::Tensor& parameter) const override;
  std::unique_ptr<LeanParamState> make_state(
      const at::Tensor& like, const torch::optim::OptimizerOptions& options) const override;
  std::unique_ptr<LeanParamState> make_empty_state() const override;
  void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& state,
              const torch::optim::OptimizerOptions& options) const override;
};

/// Its row in the table of optimizers.
OptimizerRow adamw_8bit_row();

}  // namespace headroom
