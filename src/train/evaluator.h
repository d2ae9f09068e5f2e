#pragma once

// Loss, accuracy, F1 and perplexity over the evaluation data.

#include <headroom/data/dataset.h>
#include <headroom/execute/executor.h>
#include <headroom/model/chain.h>
#include <headroom/report/results.h>

#include "execute/static_pager.h"

#include "train/class_counts.h"
#include "train/rank_group.h"
#include "train/run_settings.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace headroom {

/// Evaluation mode of a chain while the scope lives. Afterwards every module is in the mode that it
/// was in, however the scope is left.
class EvaluationScope {
 public:
  explicit EvaluationScope(const Chain& chain);
  ~EvaluationScope();
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // a parent comes first
};

class Evaluator {
 public:
  /// Null data: nothing is ever due. `pager` brings the weights that are not in memory.
  Evaluator(const RunSettings& settings, const Chain& chain, std::shared_ptr<const Dataset> data,
            StaticPager* pager = nullptr);

  /// Tries one sample, so that data that does not fit the model is found before training, and
  /// returns what an evaluation gives; nothing where there is no data, or no memory to try it.
  /// Throws DataError. Random state and the model are left as they were.
  std::optional<EvalResults> check_data() const;

  /// Whether --eval_strategy asks for an evaluation after this update; `epochs_done` after it.
  bool is_due(std::int64_t update, double epochs_done) const;
  /// Whether the last one is older than this update, the last of the run.
  bool is_due_at_end(std::int64_t update) const { return data_ && last_update_ != update; }

  /// Evaluates `batch` samples at a time; each rank takes its share of the data. A loss that
  /// compares embeddings compares those of a global batch, as in training. Collective. Throws
  /// ConfigError without data, and Stopped on every rank when any was asked to stop.
  EvalResults run(const RankGroup& ranks, std::int64_t batch) const;
  /// The same, as the one after `update`.
  const EvalResults& run_after(std::int64_t update, const RankGroup& ranks, std::int64_t batch);

  const std::optional<EvalResults>& last() const { return last_; }
  /// A new run begins.
  void forget();

 private:
  struct Sums;
  static void add(const std::vector<at::Tensor>& outputs, const MicroBatch& micro, Sums& sums,
                  ClassCounts& classes);
  Sums sum_over(const Share& share, std::int64_t batch, ClassCounts& classes) const;
  // The samples from `begin` on, at most `batch` in memory at once.
  void add_samples(std::int64_t begin, std::int64_t end, std::int64_t batch, Sums& sums,
                   ClassCounts& classes) const;
  std::vector<at::Tensor> compare_samples(std::int64_t begin, std::int64_t end, std::int64_t batch,
                                          MicroBatch& counts) const;
  static EvalResults results_of(const Sums& sums, const ClassCounts& classes);

  const RunSettings& settings_;
  Chain chain_;
  Executor executor_;
  std::shared_ptr<const Dataset> data_;
  std::optional<EvalResults> last_;
  std::int64_t last_update_ = -1;
};

}  // namespace headroom
