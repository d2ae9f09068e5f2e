#pragma once

// What a trainer holds while it runs. Setting up is in trainer_setup.cpp, one update in
// update_step.cpp, what ranks do together in trainer_ranks.cpp, what a run comes to in
// trainer_results.cpp, the loop in trainer.cpp.

#include <headroom/comm/communicator.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include <headroom/execute/optimizer_in_backward.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/factory.h>
#include <headroom/optim/grad_scaler.h>
#include <headroom/optim/schedule.h>
#include <headroom/train/run_plan.h>
#include <headroom/train/trainer.h>
#include "report/json.h"
#include "data/loader.h"

#include "train/agreement.h"
#include "train/run_log.h"
#include "train/shape_bucket.h"
#include "train/snapshot.h"
#include "train/timeline.h"
#include "train/windows.h"

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#include "memory"

namespace headroom {

struct Trainer::State {
  TrainingArguments arguments;
  Chain chain;
  std::shared_ptr<const Dataset> train_data;
  std::shared_ptr<const Dataset> eval_data;
  std::shared_ptr<Communicator> comm;
  std::int64_t num_ranks = 1;  // that share a window: of `comm`, or those that a plan is made for

  std::vector<std::pair<std::string, at::Tensor>> named_parameters;
  std::vector<at::Tensor> buffers;
  std::unique_ptr<LeanOptimizer> optimizer;
  GradScaler scaler{GradScalerOptions::disabled()};
  std::unique_ptr<OptimizerInBackward> in_backward;  // only where the plan updates there
  std::unique_ptr<Executor> executor;
  std::unique_ptr<MicroBatchLoader> loader;
  RunPlan plan;  // of the window in progress
  // With a budget, there is a plan for each bucket of shapes; without one, no bucket.
  std::map<std::string, ShapeBucket> buckets;
  std::string bucket;        // of `plan`; empty: none
  std::string first_bucket;  // that the run was planned for at its start
  Shapes window_shapes;  // the largest of the window in progress, from all attempts at it and all
                         // ranks
  std::int64_t num_plans = 0;
  std::int64_t update_ns = 0;  // that clipping and an update take; 0: not measured
  // At most one of them is set.
  std::optional<at::ScalarType> keep_in_half;
  std::optional<at::ScalarType> compute_in_half;
  TrainingPosition position;
  MicroResult work;  // summed over the run
  std::int64_t num_recoveries = 0;
  std::int64_t num_recoveries_here = 0;  // at the update in progress
  at::Tensor scratch;                    // for summing the gradients of the window in progress
  bool stops = false;                    // after the update in progress, as the ranks agreed
  bool interrupted = false;
  std::optional<EvalResults> eval;  // the last one
  std::int64_t evaluated_at = -1;   // update

  // The whole training, as Trainer::train() promises.
  TrainResults train();
  // What must hold before anything costly is done: the files can be written, the ranks were started
  // alike, the cap is set.
  void begin();
  void describe_run() const;
  void write_timeline();
  bool is_time_to_evaluate(const WindowWalk& walk) const;
  void evaluate_and_log(RunLog& log, double epochs);
  EvalResults evaluate();
  TrainResults finish(const WindowWalk& walk, RunLog& log, std::int64_t total_updates);

  // Messages for people, once, however many ranks there are.
  void tell(const std::string& message) const;
  void warn(const std::string& message) const;
  // Into the output folder, which is rank 0's to write.
  void write(const std::string& name, const Json& json) const;

  // Throws ConfigError, on every rank, when the ranks differ in what they were asked to do.
  void check_ranks_are_alike();
  // Throws CommError, on every rank, when weights or buffers are not the same everywhere, bit for
  // bit.
  void check_weights_are_equal();
  std::vector<at::Tensor> weights() const;  // parameters and buffers
  // Rank 0's weights everywhere, and random streams that differ by rank.
  void start_afresh();
  void restore_random_state();
  // Rank 0 plans, because times differ, and all use what it planned. Throws BudgetError on every
  // rank when it does there.
  RunPlan plan_together(const std::function<RunPlan()>& make) const;
  // Rank 0 writes a snapshot that holds the random state of every rank. Returns its folder on every
  // rank.
  std::string save();

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const;

  std::int64_t window_batch() const;  // over all ranks

  Grouping grouping() const;

  // Settles how half precision is used, before the first plan.
  void choose_precision();
  std::optional<at::ScalarType> half_type() const;

  double base_learning_rate() const;

  OptimizerConfig optimizer_config() const;

  std::int64_t optimizer_bytes(const std::string& name) const;

  // How long clipping and an update take, measured on stand-ins for some parameters; 0 when there
  // is no room for them.
  std::int64_t time_update() const;
  std::int64_t time_update_of_a_part(std::size_t enough_bytes) const;

  void start_optimizer();
  // Allocates the optimizer's state, as far as a snapshot has not brought it.
  void prepare_optimizer();

  // A parameter that several stages share is complete after the backward of each of them.
  void watch_backward();

  // What must be the same for a snapshot to be continued.
  std::map<std::string, std::string> resume_settings() const;

  // Of the run to go on with, as rank 0 finds it; empty: none.
  std::string snapshot_to_resume();
  void plan_from_start(const std::string& snapshot);
  void go_on_from(const std::string& snapshot, WindowWalk& walk, LrScheduler& scheduler);

  // Starts the buckets with the shapes of the first sample that will be trained.
  void look_at_first_window();

  // True when the window that this micro-batch belongs to needs another plan. To be asked before
  // the micro-batch runs.
  bool wants_other_plan(const MicroBatch& micro, bool is_first);

  // Makes, or takes out again, the plan for the shapes that the ranks met in a window of
  // `num_samples`. Throws BudgetError when nothing fits.
  void plan_for_window(const ShareReport& agreed, std::int64_t num_samples);

  RunPlan plan_with_any_split(RunPlanRequest request) const;

  void use_plan(RunPlan made);

  std::int64_t predicted_peak_bytes() const;  // of all plans
  std::int64_t smallest_micro_batch() const;  // of all plans

  // One update from the samples of a window. When memory runs out on any rank, or shapes need
  // another plan, every rank undoes the step, takes the new plan and makes the same step again.
  Update train_window(const std::vector<std::int64_t>& samples, LrScheduler& scheduler);

  // The gradients of this rank's share of the window, and how that went. Unless it is done, the
  // step must be undone.
  ShareReport run_share(const std::vector<std::int64_t>& window, std::int64_t num_items);
  void accumulate(const std::vector<std::int64_t>& share, std::int64_t num_items,
                  ShareReport& report);
  // Whatever summing needs is allocated before the ranks agree, because afterwards none may fail.
  void make_ready_to_sum(ShareReport& report);

  Update finish_window(const ShareReport& agreed, std::int64_t num_samples, std::int64_t num_items,
                       LrScheduler& scheduler);

  std::vector<at::Tensor> gradients() const;
  std::int64_t scratch_bytes() const;  // for what ranks exchange in an update

  void request_micro_batches(const std::vector<std::int64_t>& samples);

  // Unscales, clips, steps and frees the gradients; a gradient that is not finite is reported and
  // not applied.
  void apply(Update& update, LrScheduler& scheduler);

  void report_not_finite(const Update& update);

  void clear_gradients();

  // The weights and random state of before a step, so that it can be made again. Parameters change
  // only in the update itself, which allocates nothing.
  struct Undo {
    RandomState random = RandomState::capture();
    std::vector<std::string> buffers;
  };

  Undo remember() const;

  void undo_step(const Undo& undo);

  void plan_anew(const ShareReport& agreed, std::int64_t num_samples);

  // Calls `make`, which plans; when nothing fits, saves the last good state and throws BudgetError.
  void plan_or_save(const std::function<void()>& make);

  Timeline timeline;              // of the first step, for plan.json and trace.json
  bool has_planned_size = false;  // the micro-batch in progress

  MicroBatch probe_batch(std::int64_t size) const;

  // Throws ConfigError when the batch may not be cut as it would be.
  void check_batch() const;

  RunPlanRequest planning_request() const;
  std::vector<Remedy> remedies() const;
  TrainResults results(const RunLog& log, double epochs);
  // Peaks become the largest over the ranks, counts of work their sums.
  void merge_over_ranks(TrainResults& results);
};

/// True once Trainer::request_stop() was called.
bool stop_is_requested();

}  // namespace headroom
