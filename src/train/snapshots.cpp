#include "train/snapshots.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <utility>

namespace headroom {

Snapshots::Snapshots(const RunSettings& settings, const Chain& chain, const RankGroup& ranks)
    : settings_(settings),
      chain_(chain),
      ranks_(ranks),
      source_(settings.arguments.resume_from_checkpoint) {
  if (source_ == "last")
    source_ = ranks.from_first([&] { return last_snapshot(settings.arguments.output_dir); });
}

TrainingPosition Snapshots::position() const {
  return source_.empty() ? TrainingPosition{}
                         : snapshot_position(source_, settings_.resume_settings());
}

TrainingPosition Snapshots::restore(torch::optim::Optimizer& optimizer) const {
  TrainingPosition position =
      load_snapshot(source_, chain_, optimizer, settings_.resume_settings());
  ranks_.restore_random_states(position.random_states,
                               settings_.arguments.seed + position.global_step);
  ranks_.check_weights_are_equal(chain_, position.global_step);
  return position;
}

bool Snapshots::are_due(std::int64_t update) const {
  const std::int64_t steps = settings_.arguments.save_steps;
  return steps > 0 && update % steps == 0;
}

std::string Snapshots::save(TrainingPosition position,
                            const torch::optim::Optimizer& optimizer) const {
  constexpr char kWritten = '+', kFailed = '-';
  ranks_.check_weights_are_equal(chain_, position.global_step);
  position.settings = settings_.resume_settings();
  position.random_states = ranks_.random_states();
  const TrainingArguments& arguments = settings_.arguments;
  const std::string message = ranks_.from_first([&] {
    try {
      return kWritten + save_snapshot(arguments.output_dir, chain_, optimizer, position,
                                      arguments.save_total_limit);
    } catch (const SnapshotError& error) {
      return kFailed + std::string(error.what());
    }
  });
  if (message.front() == kFailed) throw SnapshotError(message.substr(1));
  return message.substr(1);
}

void Snapshots::save_or_warn(const TrainingPosition& position,
                             const torch::optim::Optimizer& optimizer) const {
  try {
    save(position, optimizer);
  } catch (const SnapshotError& error) {
    if (ranks_.is_first())
      log_warning(fmt::format("update {}: no snapshot ({}); training goes on", position.global_step,
                              error.what()));
  }
}

}  // namespace headroom
