#include <headroom/train/trainer.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "core/log.h"

#include <headroom/model/chain.h>
#include "execute/static_pager.h"

#include "train/evaluator.h"
#include "train/plan_run.h"
#include "train/rank_group.h"
#include "train/run_planner.h"
#include "train/run_settings.h"
#include "train/stop.h"
#include "train/training_run.h"

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

void check_model_and_data(const Chain& chain, const Dataset* data) {
  if (chain.size() == 0) throw ConfigError("the chain has no stage: there is nothing to train");
  if (data == nullptr || data->size() == 0) throw DataError("there is no data to train on");
  if (chain.parameters().empty())
    throw ConfigError("the model has no parameter that requires a gradient");
}

void check_batch(const RunSettings& settings, const Chain& chain, const Dataset& data) {
  check_split(chain, settings.arguments.fixed_micro_batch(),
              std::min(settings.window_samples(), data.size()), settings.num_ranks);
}

// Paging needs a folder, and one rank: ranks would have to agree on what each of them holds.
std::unique_ptr<StaticPager> make_pager(const RunSettings& settings, const Chain& chain) {
  if (settings.arguments.spill_dir.empty() || settings.num_ranks > 1) return nullptr;
  auto pager = std::make_unique<StaticPager>(chain, settings.arguments.spill_dir,
                                             settings.state_bytes_of_parameter(),
                                             has_independent_elements(settings.optimizer.name));
  if (pager->has_weights_on_disk()) pager->adopt_least();  // the model was made there
  return pager;
}

}  // namespace

// What outlives a run. What a run changes is made by train().
struct Trainer::Parts {
  Parts(TrainingArguments arguments, Chain model, std::shared_ptr<const Dataset> training_data,
        std::shared_ptr<const Dataset> evaluation_data, std::shared_ptr<Communicator> communicator)
      : chain(std::move(model)),
        data(std::move(training_data)),
        ranks(std::move(communicator)),
        settings(std::move(arguments), ranks.size()),
        pager(make_pager(settings, chain)),
        planner(settings, chain, *data, ranks, pager.get()),
        evaluator(settings, chain, std::move(evaluation_data), pager.get()) {}

  Chain chain;
  std::shared_ptr<const Dataset> data;
  RankGroup ranks;
  RunSettings settings;
  std::unique_ptr<StaticPager> pager;
  RunPlanner planner;
  Evaluator evaluator;
  TrainerCallbacks callbacks;
};

Trainer::Trainer(TrainingArguments arguments, Chain chain,
                 std::shared_ptr<const Dataset> train_data,
                 std::shared_ptr<const Dataset> eval_data,
                 std::shared_ptr<Communicator> communicator) {
  check_model_and_data(chain, train_data.get());
  for (const at::Tensor& tensor : weights_of(chain))
    MemoryMeter::instance().assign_owner(tensor, Owner::kWeights);
  parts_ = std::make_unique<Parts>(std::move(arguments), std::move(chain), std::move(train_data),
                                   std::move(eval_data), std::move(communicator));
  const std::string& precision = parts_->settings.precision.reason;
  if (parts_->ranks.is_first() && !precision.empty()) log_info(precision);
}

Trainer::~Trainer() = default;

void Trainer::set_callbacks(TrainerCallbacks callbacks) {
  parts_->callbacks = std::move(callbacks);
}

void Trainer::request_stop() { headroom::request_stop(); }

bool Trainer::was_interrupted() const { return was_interrupted_; }

RunPlan Trainer::plan() {
  const Parts& parts = *parts_;
  const TrainingArguments& arguments = parts.settings.arguments;
  const RunSettings settings(
      arguments, parts.ranks.size() > 1 ? parts.ranks.size() : arguments.nproc_per_node);
  check_batch(settings, parts.chain, *parts.data);
  MemoryMeter::instance().set_cap(arguments.memory_budget_bytes);
  parts.chain.train(true);
  StaticPager* pager = settings.num_ranks == 1 ? parts.pager.get() : nullptr;
  return RunPlanner(settings, parts.chain, *parts.data, parts.ranks, pager).preview();
}

EvalResults Trainer::evaluate() {
  return parts_->ranks.leaving_on_errors(
      [&] { return parts_->evaluator.run(parts_->ranks, parts_->planner.smallest_micro_batch()); });
}

TrainResults Trainer::train() {
  const StopScope stop_scope;
  Parts& parts = *parts_;
  was_interrupted_ = false;
  return parts.ranks.leaving_on_errors([&] {
    TrainingRun run(parts.settings, parts.chain, *parts.data, parts.ranks, parts.planner,
                    parts.evaluator, parts.callbacks, parts.pager.get());
    TrainResults results = run.train();
    was_interrupted_ = run.was_interrupted();
    return results;
  });
}

}  // namespace headroom
