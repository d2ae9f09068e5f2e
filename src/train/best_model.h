#pragma once

// The best evaluation of a run: its weights, and when to give up waiting for a better one.

#include <headroom/model/chain.h>
#include <headroom/report/results.h>

#include "train/rank_group.h"
#include "train/run_settings.h"
#include "train/snapshot.h"

#include <string>

namespace headroom {

/// The metric that --metric_for_best_model names. Throws ConfigError, naming those that there are,
/// when this model's evaluation does not give it.
double metric_of(const EvalResults& results, const std::string& name);

class BestModel {
 public:
  /// Everything given must outlive it.
  BestModel(const RunSettings& settings, const Chain& chain, const RankGroup& ranks);

  /// Notes in `position` whether this evaluation, after position.global_step updates, is the best
  /// so far. With --load_best_model_at_end the weights of the best are kept, on disk. Collective.
  void add(const EvalResults& results, TrainingPosition& position) const;

  /// Whether --early_stopping_patience evaluations in a row brought nothing better.
  bool is_patience_over(const TrainingPosition& position) const;

  /// The weights of the best evaluation on every rank, where they were asked for and there is one.
  /// Collective. Throws DataError when they are gone.
  void restore(const TrainingPosition& position) const;

  /// The folder with the weights after `update`; empty: they are not kept.
  std::string folder(std::int64_t update) const;

 private:
  const RunSettings& settings_;
  const Chain& chain_;
  const RankGroup& ranks_;
};

}  // namespace headroom
