#pragma once

// One run from its start, or from a snapshot, to its end: the loop over the parts.

#include <headroom/report/results.h>
#include <headroom/train/trainer.h>

#include "train/best_model.h"
#include "train/evaluator.h"
#include "train/rank_group.h"
#include "train/run_planner.h"
#include "train/run_settings.h"
#include "train/run_writer.h"
#include "train/snapshots.h"
#include "train/update_step.h"
#include "train/windows.h"

#include <cstdint>
#include <string>

namespace headroom {

class TrainingRun {
 public:
  /// Checks what must hold before anything costly is done: the files can be written, the ranks were
  /// started alike, the snapshot to resume from is whole. Sets the meter's cap. Everything given
  /// must outlive the run. Collective, like train().
  TrainingRun(const RunSettings& settings, const Chain& chain, const Dataset& data,
              const RankGroup& ranks, RunPlanner& planner, Evaluator& evaluator,
              const TrainerCallbacks& callbacks, StaticPager* pager = nullptr);

  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  /// As Trainer::train() promises.
  TrainResults train();
  bool was_interrupted() const { return was_interrupted_; }

 private:
  void start();
  void make_update(const Window& window);
  const EvalResults& measure();
  void evaluate();
  // Tells the data what will be loaded next, so that it can read ahead.
  void announce_samples(std::int64_t num_samples);
  TrainingState state() const;
  // What callbacks asked for on any rank.
  bool stops(const TrainingControl& control) const;
  TrainResults finish();
  TrainResults interrupt();
  // Called while an error is handled: saves the last good state, and throws the error with its
  // place.
  [[noreturn]] void rescue();
  TrainingPosition position_to_save() const;
  TrainResults write_results();
  void note_best(TrainResults& results) const;
  void tell_if_data_was_slow(const TrainResults& results) const;

  // For calls that fail on every rank when they fail on one.
  template <typename Call>
  decltype(auto) together(const Call& call);

  const RunSettings& settings_;
  const Chain& chain_;
  const Dataset& data_;
  const RankGroup& ranks_;
  RunPlanner& planner_;
  Evaluator& evaluator_;
  StaticPager* const pager_;  // null: nothing may be paged
  RunWriter writer_;
  Snapshots snapshots_;
  BestModel best_;
  const TrainerCallbacks& callbacks_;
  TrainingPosition position_;
  WindowWalk windows_;
  WindowWalk announced_;            // ahead of windows_
  std::int64_t num_announced_ = 0;  // samples of this rank that were announced and not loaded
  Update last_update_;
  UpdateStep step_;

  const std::int64_t total_updates_;
  double epochs_done_;
  bool has_started_ = false;      // there is a plan, and the optimizer has its state
  bool failed_together_ = false;  // every rank knows of the error
  bool was_interrupted_ = false;
  bool ends_early_ = false;
};

}  // namespace headroom
