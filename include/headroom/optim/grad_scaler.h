#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace headroom {

/// Names and defaults of torch.cuda.amp.GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< updates without overflow after which the scale grows
  bool enabled = true;                  ///< false: scale 1, no checks, no cost

  static GradScalerOptions disabled() {
    GradScalerOptions options;
    options.enabled = false;
    return options;
  }
};

/// What a snapshot keeps of a GradScaler. Restoring it continues exactly.
struct GradScalerState {
  double scale = 1;
  std::int64_t growth_tracker = 0;  ///< updates without overflow since the scale changed last
  std::int64_t num_skipped = 0;
};

/// Dynamic loss scaling by PyTorch's rules: small gradients survive fp16 because the loss is
/// multiplied by a large number, and an update whose gradients overflow is skipped with a smaller
/// number for the next.
///
///     for each micro-batch: scaler.scale(loss).backward();
///     if (scaler.unscale(gradients)) { clip; step; schedule; }  // false: drop the gradients
///     scaler.update();                                          // once per update
///
/// With several ranks, sum the gradients before unscale(): an overflow on one rank is then seen by
/// all, and they skip together.
class GradScaler {
 public:
  /// Throws ConfigError unless init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1 and
  /// growth_interval > 0.
  explicit GradScaler(const GradScalerOptions& options = {});

  bool enabled() const { return options_.enabled; }
  /// The number that losses are multiplied by now; 1 if not enabled.
  double scale_factor() const { return scale_; }
  /// Updates that were skipped so far.
  std::int64_t num_skipped() const { return num_skipped_; }

  /// The loss times scale_factor(). The loss itself if not enabled.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients by scale_factor() in place, and says whether all of them are finite.
  /// Undefined ones are passed over. If it returns false, skip the update and drop the gradients.
  /// Throws Error if it was called before in this update.
  bool unscale(const std::vector<at::Tensor>& gradients);
  /// The same for the gradients of all parameters of an optimizer.
  bool unscale(torch::optim::Optimizer& optimizer);

  /// For gradients that are complete, and leave memory, before others are: unscales these. The
  /// unscale() that ends the update must not be given them, and answers for them, too.
  void unscale_part(const std::vector<at::Tensor>& gradients);
  /// The update starts anew: what unscale_part() saw does not count.
  void forget_parts() { overflow_in_part_ = false; }

  /// Ends the update: backs off after an overflow, grows after growth_interval updates without one.
  /// Throws Error without unscale() before.
  void update();

  GradScalerState state() const { return {scale_, growth_tracker_, num_skipped_}; }
  /// Throws SnapshotError on a scale that is not a positive number.
  void restore(const GradScalerState& state);

 private:
  GradScalerOptions options_;
  float scale_;  // single precision, as in PyTorch
  std::int64_t growth_tracker_ = 0;
  std::int64_t num_skipped_ = 0;
  bool unscaled_ = false;
  bool overflow_ = false;
  bool overflow_in_part_ = false;
};

}  // namespace headroom
