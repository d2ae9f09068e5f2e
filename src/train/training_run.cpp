#include "train/training_run.h"

#include <headroom/core/error.h>
#include <headroom/execute/accumulator.h>
#include <headroom/memory/meter.h>

#include "train/plan_run.h"
#include "train/run_results.h"
#include "train/stop.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace headroom {
namespace {

// Called while an error is handled: the same kind of error, saying more.
[[noreturn]] void rethrow_saying(const std::string& more) {
  try {
    throw;
  } catch (const BudgetError& error) {
    throw BudgetError(error.what() + more);
  } catch (const DataError& error) {
    throw DataError(error.what() + more);
  } catch (const ConfigError& error) {
    throw ConfigError(error.what() + more);
  } catch (const CommError& error) {
    throw CommError(error.what() + more);
  } catch (const Error& error) {
    throw Error(error.exit_code(), error.what() + more);
  }
}

// Before anything is written.
const RunSettings& checked(const RunSettings& settings, const Chain& chain, const Dataset& data,
                           const RankGroup& ranks) {
  if (settings.arguments.nproc_per_node > 1 && ranks.size() == 1) {
    throw ConfigError(
        fmt::format("--nproc_per_node {} without ranks: give the trainer a communicator of them",
                    settings.arguments.nproc_per_node));
  }
  check_split(chain, settings.arguments.fixed_micro_batch(),
              std::min(settings.window_samples(), data.size()), settings.num_ranks);
  ranks.check_alike(settings, chain, data);
  return settings;
}

void warn_about_batch_norms(const Chain& chain, const RunPlan& plan) {
  if (plan.num_ranks == 1 && plan.num_micro_batches() == 1) return;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (const auto module = chain.stage(i).module())
      warn_about_batch_norm(*module, chain.stage(i).name());
  }
}

}  // namespace

TrainingRun::TrainingRun(const RunSettings& settings, const Chain& chain, const Dataset& data,
                         const RankGroup& ranks, RunPlanner& planner, Evaluator& evaluator,
                         StaticPager* pager)
    : settings_(settings),
      chain_(chain),
      data_(data),
      ranks_(ranks),
      planner_(planner),
      evaluator_(evaluator),
      pager_(pager),
      writer_(checked(settings, chain, data, ranks).arguments, !ranks.is_first()),
      snapshots_(settings, chain, ranks),
      position_(snapshots_.position()),
      windows_(settings.grouping(data), position_.global_step),
      step_(settings, chain, data, planner, ranks,
            {[this](std::size_t operation, bool has_planned_size) {
               writer_.on_operation(operation, has_planned_size);
             },
             [this] { writer_.on_undo(); }},
            pager),
      total_updates_(settings.total_updates(data)),
      epochs_done_(windows_.epochs_done()) {
  MemoryMeter::instance().set_cap(settings.arguments.memory_budget_bytes);
  planner_.on_plan([this](const PlanNews& news, const RunPlan& plan) { writer_.add(news, plan); });
  evaluator_.forget();
}

TrainingRun::~TrainingRun() { planner_.on_plan({}); }

template <typename Call>
decltype(auto) TrainingRun::together(const Call& call) {
  try {
    return call();
  } catch (const OtherRankFailed&) {
    failed_together_ = true;
    throw;
  } catch (const CommError&) {
    throw;
  } catch (...) {
    failed_together_ = true;
    throw;
  }
}

TrainResults TrainingRun::train() {
  try {
    start();
    while (position_.global_step < total_updates_) {
      make_update(windows_.next());
      if (evaluator_.is_due(position_.global_step, epochs_done_)) evaluate();
      if (snapshots_.are_due(position_.global_step))
        snapshots_.save_or_warn(position_to_save(), step_.optimizer());
    }
    return finish();
  } catch (const Stopped&) {
    return interrupt();
  } catch (...) {
    rescue();
  }
}

void TrainingRun::start() {
  evaluator_.check_data();
  if (ranks_.any(stop_is_requested())) throw Stopped();
  chain_.train(true);
  const bool is_new = snapshots_.source().empty();
  if (is_new) {
    ranks_.share_weights(chain_);
    ranks_.start_random_streams(settings_.arguments.seed);
  }
  planner_.start(position_);
  if (!is_new) {
    // State that does not fit is read onto the disk.
    std::optional<MappedAllocationScope> on_disk;
    if (pager_ != nullptr && planner_.plan().paging.is_active()) on_disk.emplace(pager_->store());
    position_ = snapshots_.restore(step_.optimizer());
    step_.resume(position_.global_step - position_.num_skipped_updates, position_.scaler);
  }
  step_.prepare();
  has_started_ = true;
  writer_.tell(settings_.learning_rate_note());
  if (!is_new)
    writer_.tell(
        fmt::format("resumed from {} at update {}", snapshots_.source(), position_.global_step));
  writer_.describe(planner_.plan());
  if (ranks_.is_first()) warn_about_batch_norms(chain_, planner_.plan());
  writer_.start(position_.global_step, total_updates_);
}

void TrainingRun::make_update(const Window& window) {
  writer_.start_update(planner_.plan());
  const Update update = together([&] { return step_.run(window); });
  ++position_.global_step;
  if (update.applied) {
    position_.loss_sum += update.loss;
  } else {
    ++position_.num_skipped_updates;
  }
  epochs_done_ = windows_.epochs_done();
  writer_.add(update, position_, epochs_done_, planner_.plan());
}

void TrainingRun::evaluate() {
  const EvalResults& results = together([&]() -> const EvalResults& {
    return evaluator_.run_after(position_.global_step, ranks_, planner_.smallest_micro_batch());
  });
  writer_.add(results, position_.global_step, epochs_done_);
}

TrainResults TrainingRun::finish() {
  TrainResults results = write_results();
  if (evaluator_.is_due_at_end(position_.global_step)) evaluate();
  results.eval = evaluator_.last();
  writer_.write(results);
  return results;
}

TrainResults TrainingRun::interrupt() {
  was_interrupted_ = true;
  std::string folder = snapshots_.source();
  if (!has_started_ && folder.empty()) {
    step_.prepare();
    has_started_ = true;
  }
  if (has_started_) folder = snapshots_.save(position_to_save(), step_.optimizer());
  writer_.finish();
  writer_.warn(fmt::format("interrupted at update {}; continue with --resume_from_checkpoint {}",
                           position_.global_step, folder));
  return write_results();
}

// Before the final evaluation: whatever becomes of that, what was trained is not lost.
TrainResults TrainingRun::write_results() {
  if (!writer_.has_log()) writer_.start(position_.global_step, total_updates_);
  writer_.finish();
  TrainResults results = results_of(settings_, chain_, ranks_, planner_, step_, writer_.log(),
                                    position_, epochs_done_);
  results.eval = evaluator_.last();
  writer_.write(results);
  writer_.save_model(chain_, results);
  return results;
}

void TrainingRun::rescue() {
  const bool can_save =
      has_started_ && step_.is_intact() && (failed_together_ || ranks_.size() == 1);
  if (!can_save) throw;
  std::string place;
  try {
    // Saving copies nothing large, but must not fail for a few bytes.
    MemoryMeter::instance().set_cap(0);
    place = snapshots_.save(position_to_save(), step_.optimizer());
  } catch (const std::exception& error) {
    writer_.warn(fmt::format("the last good state cannot be saved: {}", error.what()));
  }
  writer_.finish();
  if (place.empty()) throw;
  writer_.warn(
      fmt::format("the last good state, of update {}, is in {}", position_.global_step, place));
  rethrow_saying("; the last good state is in " + place);
}

TrainingPosition TrainingRun::position_to_save() const {
  TrainingPosition position = position_;
  position.scaler = step_.scaler_state();
  planner_.describe_splits(position);
  return position;
}

}  // namespace headroom
