#pragma once

#include <headroom/config/accumulation_schedule.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim
namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace headroom {

/// Whether the loss of a micro-batch was averaged or summed over its items.
enum class LossReduction { kMean, kSum };

/// What happens to an update whose gradient has a NaN or an infinity.
enum class NonFinitePolicy { kSkip, kError };

/// What a window adds up to.
struct WindowTotals {
  std::int64_t items = 0;
  double loss_sum = 0;  ///< summed over the items
};

struct AccumulatorOptions {
  LossReduction loss_reduction = LossReduction::kMean;
  /// The averaged gradient is clipped to this global norm; 0 means no clipping.
  double max_grad_norm = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kSkip;
  /// Called once per window, before averaging and clipping, with the gradients summed over the
  /// window's items: data parallel sums the gradients, in place, and the totals over the ranks.
  /// When it is set, every parameter has a gradient (zeros where it was not used) and a window
  /// without items calls it too, so that all ranks reduce the same tensors.
  std::function<void(const std::vector<at::Tensor>& gradients, WindowTotals& totals)> reduce;
};

/// What happened at the end of a window.
struct WindowReport {
  double loss = 0;  ///< mean over the items of the window, i.e. the loss of the global batch; NaN
                    ///< without items
  double grad_norm = 0;                ///< global norm of the averaged gradient, before clipping
  std::int64_t items = 0;              ///< over all ranks
  std::int64_t num_micro_batches = 0;  ///< of this rank
  bool updated = false;
};

/// Gradient accumulation for any torch::optim::Optimizer: several micro-batches, one update, and
/// the gradient of the batch that they make together.
///
///     headroom::GradientAccumulator accumulator(optimizer, 4);
///     for (auto& micro : micro_batches) {
///       auto loss = cross_entropy(model(micro.x), micro.y);  // mean over its items
///       if (accumulator.backward(loss, micro.num_items)) scheduler.step();
///     }
///     if (accumulator.flush()) scheduler.step();  // the last window may be shorter
///
/// Each micro-batch is weighted by its items, which need not be known in advance. Gradients add up
/// in place in the parameters' .grad and are averaged, clipped, applied and freed (set to
/// undefined) at the end of the window; those found when a window opens are dropped. Parameters in
/// half precision, and all parameters when the loss itself is in half precision, add up in fp32
/// tensors beside .grad, which are rounded once, for the optimizer. Between calls .grad is a
/// partial sum of no particular scale: do not clip or step by hand.
///
/// Optimizers that need a closure (LBFGS) are not supported. Not thread-safe.
class GradientAccumulator {
 public:
  /// `steps` is a number of micro-batches or a schedule by epoch, {{0, 8}, {4, 2}}. `optimizer`
  /// must outlive this object.
  GradientAccumulator(torch::optim::Optimizer& optimizer, AccumulationSchedule steps,
                      AccumulatorOptions options = {});
  /// Takes the names of the parameters from `model`, for messages, and warns when it has BatchNorm
  /// and a window has several micro-batches.
  GradientAccumulator(torch::optim::Optimizer& optimizer, AccumulationSchedule steps,
                      const torch::nn::Module& model, AccumulatorOptions options = {});

  /// Runs backward from the loss of one micro-batch with `items` items; at the end of the window
  /// updates. Returns whether this call updated: false inside a window, when the update was
  /// skipped, and when the window had no items. With 0 items the micro-batch counts as a step of
  /// the window, and its loss is not read.
  /// - Throws ConfigError, with everything unchanged, for negative items or a loss that is not one
  ///   number.
  /// - Throws Error when a parameter changed inside the window (an optimizer that steps in backward
  ///   cannot accumulate), when no parameter received a gradient, or, with NonFinitePolicy::kError,
  ///   when the gradient is not finite.
  /// - After any exception other than ConfigError the window is unusable until discard(); an
  ///   exception out of the optimizer's step() may leave parameters half updated.
  bool backward(const at::Tensor& loss, std::int64_t items);

  /// Ends the window with the micro-batches that it has, weighted by their items; does nothing when
  /// none is open. Returns whether it updated.
  bool flush();

  /// Drops the window: gradients, items and a failed backward. The next backward() opens a new one.
  void discard();

  /// Sets the steps that the schedule has for this epoch. Throws Error when a window is open:
  /// flush() or discard() it first, so that no window spans a change. Without a call it is epoch 0.
  void start_epoch(std::int64_t epoch);

  /// Micro-batches of a full window, now.
  std::int64_t steps() const { return steps_; }
  /// Micro-batches in the open window; 0 when none is open.
  std::int64_t num_pending() const { return num_micro_batches_; }
  std::int64_t num_updates() const { return num_updates_; }
  /// Windows whose gradient was not finite.
  std::int64_t num_skipped_updates() const { return num_skipped_updates_; }
  const WindowReport& last_window() const { return last_window_; }

  GradientAccumulator(const GradientAccumulator&) = delete;
  GradientAccumulator& operator=(const GradientAccumulator&) = delete;

 private:
  void check_usable() const;
  void open_window();
  void add(const at::Tensor& loss, std::int64_t items);
  void check_gradients_arrived();
  void check_parameters_unchanged() const;
  void move_to_sum(std::size_t index, double weight);
  std::vector<at::Tensor> gather_gradients();
  bool close_window();
  void update(std::vector<at::Tensor> gradients, double factor);
  void skip(const std::vector<at::Tensor>& gradients);
  void drop_gradients();
  void reset_window();
  std::string parameter_name(std::size_t index) const;

  torch::optim::Optimizer& optimizer_;
  AccumulationSchedule schedule_;
  AccumulatorOptions options_;
  std::unordered_map<const void*, std::string> names_;  // by the parameter's TensorImpl

  std::int64_t steps_;
  std::int64_t num_updates_ = 0;
  std::int64_t num_skipped_updates_ = 0;
  WindowReport last_window_;
  bool gradients_arrived_ = false;  // ever

  // The open window. The gradient summed over its items is reference_items_ x (.grad, or the fp32
  // sum).
  std::vector<at::Tensor> parameters_;       // of all groups, each once
  std::vector<std::uint64_t> fingerprints_;  // of the parameters when the window opened
  std::vector<at::Tensor> sums_;  // fp32, where .grad cannot be the sum; undefined elsewhere
  std::int64_t num_micro_batches_ = 0;
  std::int64_t items_ = 0;
  double reference_items_ = 0;  // of the first micro-batch that has any
  at::Tensor
      loss_sum_;  // a double on the loss's device: reading it is left to the end of the window
  bool failed_ = false;
};

/// Warns, once per process and with the module's name, when `module` has BatchNorm in training
/// mode: its statistics are those of each micro-batch, so that accumulation differs from the large
/// batch. `prefix` goes before the name. Returns the name of the first such module.
std::optional<std::string> warn_about_batch_norm(const torch::nn::Module& module,
                                                 const std::string& prefix = {});

}  // namespace headroom
