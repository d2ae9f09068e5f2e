#include <headroom/optim/schedule.h>

#include <headroom/core/error.h>

#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>

namespace headroom {

ScheduleKind parse_schedule_kind(std::string_view text) {
  for (const ScheduleKind kind :
       {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine}) {
    if (text == schedule_kind_name(kind)) return kind;
  }
  throw ConfigError(
      fmt::format("unknown learning rate schedule '{}'; use constant, linear or cosine", text));
}

const char* schedule_kind_name(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::kConstant:
      return "constant";
    case ScheduleKind::kLinear:
      return "linear";
    case ScheduleKind::kCosine:
      return "cosine";
  }
  return "unknown";
}

LearningRateSchedule::LearningRateSchedule(ScheduleKind kind, std::int64_t num_updates,
                                           std::int64_t warmup_updates)
    : kind_(kind), num_updates_(num_updates), warmup_updates_(warmup_updates) {
  if (num_updates < 0 || warmup_updates < 0) {
    throw ConfigError(fmt::format(
        "a learning rate schedule of {} updates with {} of warm-up: neither may be negative",
        num_updates, warmup_updates));
  }
  if (kind != ScheduleKind::kConstant && num_updates < 1) {
    throw ConfigError(
        fmt::format("a {} learning rate schedule needs the number of updates of the training",
                    schedule_kind_name(kind)));
  }
}

double LearningRateSchedule::at(std::int64_t update) const {
  if (update < 0)
    throw ConfigError(
        fmt::format("update {} of a learning rate schedule: updates count from 0", update));
  if (update < warmup_updates_)
    return static_cast<double>(update) / static_cast<double>(warmup_updates_);
  if (kind_ == ScheduleKind::kConstant) return 1.0;
  const auto num_falling =
      static_cast<double>(std::max<std::int64_t>(1, num_updates_ - warmup_updates_));
  if (kind_ == ScheduleKind::kLinear)
    return std::max(0.0, static_cast<double>(num_updates_ - update) / num_falling);
  // Held at its end: a cosine that goes on would raise the rate again when training runs longer
  // than it was said to.
  const double progress =
      std::min(1.0, static_cast<double>(update - warmup_updates_) / num_falling);
  constexpr double kPi = 3.14159265358979323846;
  return std::max(0.0, 0.5 * (1.0 + std::cos(kPi * progress)));
}

LrScheduler::LrScheduler(torch::optim::Optimizer& optimizer, LearningRateSchedule schedule)
    : optimizer_(optimizer), schedule_(schedule) {
  for (const auto& group : optimizer_.param_groups()) base_.push_back(group.options().get_lr());
  if (base_.empty())
    throw ConfigError(
        "a learning rate scheduler needs an optimizer with at least one group of parameters");
  set_update(0);
}

void LrScheduler::set_update(std::int64_t update) {
  const double factor = schedule_.at(update);
  auto& groups = optimizer_.param_groups();
  if (groups.size() != base_.size()) {
    throw ConfigError(
        fmt::format("the optimizer has {} groups of parameters now and had {} when its scheduler "
                    "was made; make the scheduler after "
                    "the last group was added",
                    groups.size(), base_.size()));
  }
  for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(base_[i] * factor);
  update_ = update;
}

double scale_lr_by_batch(double learning_rate, std::int64_t global_batch, std::int64_t base_batch) {
  if (global_batch < 1 || base_batch < 1) {
    throw ConfigError(
        fmt::format("the linear scaling rule needs batches of at least 1, not {} and {}",
                    global_batch, base_batch));
  }
  return learning_rate * static_cast<double>(global_batch) / static_cast<double>(base_batch);
}

}  // namespace headroom
