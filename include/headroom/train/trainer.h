#pragma once

#include <headroom/comm/communicator.h>
#include <headroom/config/training_arguments.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/report/results.h>
#include <headroom/train/run_plan.h>

#include <functional>
#include <memory>
#include <string>

namespace headroom {

/// Where a run stands, for callbacks.
struct TrainingState {
  std::int64_t update = 0;  ///< updates done
  std::int64_t num_updates = 0;
  double epoch = 0.0;  ///< epochs done
  double loss = 0.0;   ///< of the last global batch
  double grad_norm = 0.0;
  double learning_rate = 0.0;
};

/// What a callback may ask for.
struct TrainingControl {
  bool should_stop = false;  ///< the run ends here, as if this were its last update
};

/// Called by train(), on every rank. Either may be empty.
struct TrainerCallbacks {
  std::function<void(const TrainingState&, TrainingControl&)> on_update;
  std::function<void(const TrainingState&, const EvalResults&, TrainingControl&)> on_evaluation;
};

/// Trains a chain on a dataset as TrainingArguments say.
///     headroom::Trainer trainer(arguments, chain, train_data, test_data);
///     headroom::TrainResults results = trainer.train();
/// The files of interface "output_dir" (train_results.json, metrics.jsonl, plan.json, snapshots)
/// are written there.
///
/// With a communicator of several ranks, every rank makes a trainer of the same chain, data and
/// arguments, and calls the same methods: each trains its share of every global batch, gradients
/// are summed once per update, and all have the same weights, bit for bit. Rank 0 alone plans,
/// writes and shows. A trainer that throws leaves the communicator, so that no rank waits for
/// another that has ended.
class Trainer {
 public:
  /// `eval_data` may be null. The arguments are validated: throws ConfigError. A null communicator
  /// is one rank.
  Trainer(TrainingArguments arguments, Chain chain, std::shared_ptr<const Dataset> train_data,
          std::shared_ptr<const Dataset> eval_data = nullptr,
          std::shared_ptr<Communicator> communicator = nullptr);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// With several ranks, every rank has callbacks or none has; all stop when one asks for it.
  void set_callbacks(TrainerCallbacks callbacks);

  /// Runs the whole training. Throws BudgetError before anything is trained when the budget cannot
  /// be met, DataError before it when the evaluation data does not fit the model, and CommError
  /// when another rank was lost. An error in the middle of a run (a bad sample, no memory) leaves a
  /// snapshot of the last good state, and its message says where. Results are written before the
  /// final evaluation.
  TrainResults train();

  /// The plan that train() would use, with what half and double the budget would give. Trains
  /// nothing, and talks to no other rank: without a communicator, it is the plan for
  /// arguments.nproc_per_node ranks.
  RunPlan plan();

  /// Loss and accuracy over the evaluation data.
  EvalResults evaluate();

  /// Asks train() to stop, from another thread or a signal handler: the run under way, or the next
  /// one. It is looked at between the operations of a step, and while planning and evaluating; a
  /// step that is not done is undone, and a snapshot of the state before it is written. Any rank
  /// may ask: all stop at the same update.
  static void request_stop();
  /// True when the last train() ended because of request_stop().
  bool was_interrupted() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  bool was_interrupted_ = false;
};

/// SHA-256 over the bytes of all parameters and buffers in order: equal for runs that made the same
/// numbers.
std::string weights_sha256(const Chain& chain);

}  // namespace headroom
