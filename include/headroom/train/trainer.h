#pragma once

#include <headroom/comm/communicator.h>
#include <headroom/config/training_arguments.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/report/results.h>
#include <headroom/train/run_plan.h>

#include <functional>
#include <string>
#include "memory"

namespace headroom {

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

  /// Runs the whole training. Throws BudgetError before anything is trained when the budget cannot
  /// be met, and CommError when another rank was lost.
  TrainResults train();

  /// The plan that train() would use, with what half and double the budget would give. Trains
  /// nothing, and talks to no other rank: without a communicator, it is the plan for
  /// arguments.nproc_per_node ranks.
  RunPlan plan();

  /// Loss and accuracy over the evaluation data.
  EvalResults evaluate();

  /// Asks a running train() to stop after the update in progress, from another thread or a signal
  /// handler. Any rank may: all of them stop after the same update, which is the next one when the
  /// ranks had spoken about this one already.
  static void request_stop();
  /// True when the last train() ended because of request_stop().
  bool was_interrupted() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// SHA-256 over the bytes of all parameters and buffers in order: equal for runs that made the same
/// numbers.
std::string weights_sha256(const Chain& chain);

}  // namespace headroom
