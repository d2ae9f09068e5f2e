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
                         const TrainerCallbacks& callbacks, StaticPager* pager)
    : settings_(settings),
      chain_(chain),
      data_(data),
      ranks_(ranks),
      planner_(planner),
      evaluator_(evaluator),
      pager_(pager),
      writer_(checked(settings, chain, data, ranks).arguments, !ranks.is_first()),
      snapshots_(settings, chain, ranks),
      best_(settings, chain, ranks),
      callbacks_(callbacks),
      position_(snapshots_.position()),
      windows_(settings.grouping(data), position_.global_step),
      announced_(windows_),
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
  if (pager != nullptr) writer_.watch_disk([pager] { return pager->recent_transfers(); });
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
    while (position_.global_step < total_updates_ && !ends_early_) {
      make_update(windows_.next());
      if (evaluator_.is_due(position_.global_step, epochs_done_)) evaluate();
      if (snapshots_.are_due(position_.global_step)) {
        step_.finish();
        snapshots_.save_or_warn(position_to_save(), step_.optimizer());
      }
    }
    return finish();
  } catch (const Stopped&) {
    return interrupt();
  } catch (...) {
    rescue();
  }
}

void TrainingRun::start() {
  const std::optional<EvalResults> example = evaluator_.check_data();
  if (example) metric_of(*example, settings_.arguments.metric_for_best_model);
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

void TrainingRun::announce_samples(std::int64_t num_samples) {
  // While a window is trained, the next one is read, and more where windows are small.
  constexpr std::int64_t kSamplesAhead = 256;
  const std::int64_t least = num_samples + std::max(num_samples, kSamplesAhead);
  while (num_announced_ < least && announced_.num_done() < total_updates_) {
    const Window window = announced_.next();
    const Share share = share_of(window.num_samples(), ranks_.rank(), ranks_.size());
    data_.expect(
        {window.samples.data() + share.begin, static_cast<std::size_t>(share.end - share.begin)});
    num_announced_ += window.num_samples();
  }
  num_announced_ -= num_samples;
}

TrainingState TrainingRun::state() const {
  return {position_.global_step, total_updates_,         epochs_done_,
          last_update_.loss,     last_update_.grad_norm, last_update_.learning_rate};
}

bool TrainingRun::stops(const TrainingControl& control) const {
  return ranks_.size() == 1 ? control.should_stop : ranks_.any(control.should_stop);
}

void TrainingRun::make_update(const Window& window) {
  announce_samples(window.num_samples());
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
  last_update_ = update;
  if (!callbacks_.on_update) return;
  step_.finish();
  TrainingControl control;
  callbacks_.on_update(state(), control);
  if (stops(control)) ends_early_ = true;
}

const EvalResults& TrainingRun::measure() {
  step_.finish();
  return together([&]() -> const EvalResults& {
    return evaluator_.run_after(position_.global_step, ranks_, planner_.smallest_micro_batch());
  });
}

void TrainingRun::evaluate() {
  const EvalResults& results = measure();
  writer_.add(results, position_.global_step, epochs_done_);
  best_.add(results, position_);
  if (best_.is_patience_over(position_)) {
    writer_.tell(fmt::format("update {}: no better {} in {} evaluations: training ends early",
                             position_.global_step, settings_.arguments.metric_for_best_model,
                             position_.num_evaluations_since_best));
    ends_early_ = true;
  }
  if (!callbacks_.on_evaluation) return;
  TrainingControl control;
  callbacks_.on_evaluation(state(), results, control);
  if (stops(control)) ends_early_ = true;
}

TrainResults TrainingRun::finish() {
  step_.finish();
  // The last weights may be the best ones. They are written first: see write_results().
  const bool chooses = settings_.arguments.load_best_model_at_end;
  TrainResults results = write_results();
  if (evaluator_.is_due_at_end(position_.global_step)) evaluate();
  if (chooses && position_.best && position_.best->update != position_.global_step) {
    best_.restore(position_);
    writer_.tell(fmt::format("the weights are those of update {}, whose {} of {:.4f} was the best",
                             position_.best->update, settings_.arguments.metric_for_best_model,
                             position_.best->metric));
    measure();
    results = write_results();
  }
  results.eval = evaluator_.last();
  note_best(results);
  tell_if_data_was_slow(results);
  writer_.write(results);
  return results;
}

void TrainingRun::note_best(TrainResults& results) const {
  if (!position_.best) return;
  results.best_metric = position_.best->metric;
  results.best_model_checkpoint = best_.folder(position_.best->update);
}

void TrainingRun::tell_if_data_was_slow(const TrainResults& results) const {
  constexpr double kMuch = 0.1, kFewSeconds = 2.0;
  const double waited = results.data_wait_fraction * results.train_runtime;
  if (results.data_wait_fraction < kMuch || waited < kFewSeconds) return;
  writer_.tell(fmt::format(
      "training waited for data {:.0f}% of its time: raise --dataloader_num_workers (now {})",
      100 * results.data_wait_fraction, settings_.arguments.dataloader_num_workers));
}

TrainResults TrainingRun::interrupt() {
  was_interrupted_ = true;
  std::string folder = snapshots_.source();
  if (!has_started_ && folder.empty()) {
    step_.prepare();
    has_started_ = true;
  }
  step_.finish();
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
    step_.finish();
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
