#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace headroom {

enum class ScheduleKind { kConstant, kLinear, kCosine };

/// "constant", "linear" or "cosine", as --lr_scheduler_type takes them. Throws ConfigError, quoting
/// the text, otherwise.
ScheduleKind parse_schedule_kind(std::string_view text);
const char* schedule_kind_name(ScheduleKind kind);

/// What the base learning rate is multiplied with, as a function of the update alone. As in Hugging
/// Face's schedules: it rises from 0 to 1 over the warm-up, update/warmup, and then stays
/// (constant), falls to 0 at `num_updates` in a straight line (linear) or along half a cosine
/// (cosine). After the last update it stays 0. A value.
class LearningRateSchedule {
 public:
  /// `num_updates` is the length of the training, warm-up included; a constant schedule ignores it.
  /// Throws ConfigError for negative numbers, and for a linear or cosine schedule when num_updates
  /// < 1.
  explicit LearningRateSchedule(ScheduleKind kind, std::int64_t num_updates = 0,
                                std::int64_t warmup_updates = 0);

  /// The factor in [0, 1] for the update with this number; the first is 0. The learning rate is
  /// base x at(update).
  double at(std::int64_t update) const;

 private:
  ScheduleKind kind_;
  std::int64_t num_updates_;
  std::int64_t warmup_updates_;
};

/// Sets the learning rate of every group of an optimizer by a schedule; each group keeps its own
/// base. Call step() once per update:
///     if (accumulator.backward(loss, items)) scheduler.step();
class LrScheduler {
 public:
  /// Reads the groups' learning rates as their bases and sets those of update 0. `optimizer` must
  /// outlive this object.
  LrScheduler(torch::optim::Optimizer& optimizer, LearningRateSchedule schedule);

  /// An update was done: sets the rates of the next one.
  void step() { set_update(update_ + 1); }
  /// Sets the rates of the update with this number, e.g. after the optimizer's state was loaded.
  void set_update(std::int64_t update);

  /// The number of the next update.
  std::int64_t update() const { return update_; }
  /// The learning rate of the first group.
  double learning_rate() const { return base_.front() * schedule_.at(update_); }

 private:
  torch::optim::Optimizer& optimizer_;
  LearningRateSchedule schedule_;
  std::vector<double> base_;  // per group
  std::int64_t update_ = 0;
};

/// The linear scaling rule: learning_rate x global_batch / base_batch. Throws ConfigError unless
/// both batches are at least 1.
double scale_lr_by_batch(double learning_rate, std::int64_t global_batch, std::int64_t base_batch);

}  // namespace headroom
