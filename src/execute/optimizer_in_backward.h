#pragma once

#include <headroom/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

namespace headroom {

/// What a run asks for that may rule out the optimizer in backward.
struct UpdateDemands {
  double max_grad_norm = 0;         ///< 0: no clipping by the global norm
  bool dynamic_loss_scale = false;  ///< a GradScaler that may skip updates
  std::int64_t num_ranks = 1;
};

/// Why the optimizer cannot run in backward under these demands, with the remedy; empty if it can.
std::string why_not_in_backward(const UpdateDemands& demands);

/// Updates each parameter as soon as its gradient is complete, inside backward, and frees the
/// gradient at once: instead of the gradients of all parameters, only those of a layer or two are
/// live. The weights are bit-identical to those of an ordinary step.
///
///     OptimizerInBackward in_backward(*optimizer);
///     for each window:
///       backward of all micro-batches but the last  // gradients add up as usual
///       in_backward.arm();
///       backward of the last micro-batch            // updates each parameter on the way
///       in_backward.finish();
///
/// Gradients must need no further factor: scale the losses beforehand. An exception out of the
/// armed backward leaves some parameters updated and others not; call disarm() and go back to a
/// snapshot.
class OptimizerInBackward {
 public:
  /// Watches every parameter of the optimizer that requires a gradient now. The optimizer must
  /// outlive this object, whose end stops the watching.
  explicit OptimizerInBackward(LeanOptimizer& optimizer);
  ~OptimizerInBackward();
  OptimizerInBackward(const OptimizerInBackward&) = delete;
  OptimizerInBackward& operator=(const OptimizerInBackward&) = delete;

  /// How many calls of backward within one micro-batch reach this parameter: its gradient is
  /// complete after the last. It is 1 unless told; several uses within one call count once. A
  /// weight that two stages of a chain share is reached by the backward of each: 2. Throws
  /// ConfigError for a parameter that is not the optimizer's, or a number below 1.
  void expect_backwards(const at::Tensor& parameter, std::int64_t num_backwards);

  /// The next micro-batch is the last of its window. Allocates missing optimizer state (owner:
  /// optimizer), so that backward does not.
  void arm();

  /// Ends the window: updates, by the gradients that they have, those parameters that the last
  /// micro-batch did not reach as often as expected. Returns how many parameters were updated in
  /// all.
  std::int64_t finish();

  /// Forgets a window that failed, with its gradients.
  void disarm();

  bool armed() const;

 private:
  struct Watch;
  std::unique_ptr<Watch> watch_;
};

}  // namespace headroom
