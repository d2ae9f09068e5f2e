#pragma once

// What a trainer holds while it runs. Setting up is in trainer_setup.cpp, one update in update_step.cpp, the loop in trainer.cpp.

#include <headroom/core/random.h>
#include <headroom/data/loader.h>
#include <headroom/execute/executor.h>
#include <headroom/execute/optimizer_in_backward.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/factory.h>
#include <headroom/optim/grad_scaler.h>
#include <headroom/optim/schedule.h>
#include <headroom/report/progress.h>
#include <headroom/report/tensorboard.h>
#include <headroom/train/run_plan.h>
#include <headroom/train/trainer.h>

#include "train/shape_bucket.h"
#include "train/snapshot.h"
#include "train/timeline.h"
#include "train/windows.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

// What one update came to.
struct Update {
  double loss = 0.0;  // of the global batch
  double grad_norm = 0.0;
  std::int64_t num_samples = 0;
  bool applied = false;
};

struct Trainer::State {
  TrainingArguments arguments;
  Chain chain;
  std::shared_ptr<const Dataset> train_data;
  std::shared_ptr<const Dataset> eval_data;

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
  std::string bucket;                        // of `plan`; empty: none
  std::string first_bucket;                  // that the run was planned for at its start
  Shapes window_shapes;                      // the largest of the window in progress, from all attempts at it
  std::vector<std::int64_t> window_samples;  // of the micro-batch that asked for another plan
  std::int64_t num_plans = 0;
  std::int64_t update_ns = 0;  // that clipping and an update take; 0: not measured
  // At most one of them is set.
  std::optional<at::ScalarType> keep_in_half;
  std::optional<at::ScalarType> compute_in_half;
  TrainingPosition position;
  MicroResult work;  // summed over the run
  std::int64_t num_recoveries = 0;
  std::int64_t num_recoveries_here = 0;  // at the update in progress
  bool interrupted = false;

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const;

  std::int64_t window_batch() const;

  Grouping grouping() const;

  // Settles how half precision is used, before the first plan.
  void choose_precision();
  std::optional<at::ScalarType> half_type() const;

  double base_learning_rate() const;

  OptimizerConfig optimizer_config() const;

  std::int64_t optimizer_bytes(const std::string& name) const;

  // How long clipping and an update take, measured on stand-ins for some parameters; 0 when there is no room for them.
  std::int64_t time_update() const;
  std::int64_t time_update_of_a_part(std::size_t enough_bytes) const;

  void start_optimizer();
  // Allocates the optimizer's state, as far as a snapshot has not brought it.
  void prepare_optimizer();

  // A parameter that several stages share is complete after the backward of each of them.
  void watch_backward();

  // What must be the same for a snapshot to be continued.
  std::map<std::string, std::string> resume_settings() const;

  std::string snapshot_to_resume() const;

  // Starts the buckets with the shapes of the first sample that will be trained.
  void look_at_first_window();

  // True when the window that this micro-batch belongs to needs another plan. To be asked before the micro-batch runs.
  bool wants_other_plan(const MicroBatch& micro, c10::ArrayRef<std::int64_t> samples, bool is_first);

  // Makes, or takes out again, the plan for the shapes of the window in progress. Throws BudgetError when nothing fits.
  void plan_for_window(std::int64_t num_samples);

  RunPlan plan_with_any_split(RunPlanRequest request) const;

  void use_plan(RunPlan made);

  std::int64_t predicted_peak_bytes() const;  // of all plans
  std::int64_t smallest_micro_batch() const;  // of all plans

  // One update, in the order in which design and docs describe it. Nothing, when the window's shapes need another plan: then
  // some of its micro-batches may have been run, and the step must be undone.
  std::optional<Update> step(const std::vector<std::int64_t>& samples, LrScheduler& scheduler);

  void request_micro_batches(const std::vector<std::int64_t>& samples);

  // Unscales, clips, steps and frees the gradients; a gradient that is not finite is reported and not applied.
  void apply(Update& update, LrScheduler& scheduler);

  void report_not_finite(const Update& update);

  void clear_gradients();

  // The weights and random state of before a step, so that it can be made again. Parameters change only in the update itself, which
  // allocates nothing.
  struct Undo {
    RandomState random = RandomState::capture();
    std::vector<std::string> buffers;
  };

  Undo remember() const;

  void undo_step(const Undo& undo);

  // Runs the step; when memory runs out all the same, undoes it, plans anew for what is left and makes the same step again.
  Update step_within_budget(const std::vector<std::int64_t>& samples, LrScheduler& scheduler);

  void plan_anew(const std::string& reason, std::int64_t window);

  // Calls `make`, which plans; when nothing fits, saves the last good state and throws BudgetError.
  void plan_or_save(const std::function<void()>& make);

  Timeline timeline;              // of the first step, for plan.json and trace.json
  bool has_planned_size = false;  // the micro-batch in progress

  MicroBatch probe_batch(std::int64_t size) const;

  RunPlanRequest planning_request() const;
  std::vector<Remedy> remedies() const;
  void log_metrics(JsonLines& metrics, TensorBoardWriter& board, const Update& update, double epochs, double learning_rate,
                   double seconds) const;
  TrainResults results(double runtime, std::int64_t num_samples, std::int64_t first_step, double epochs,
                       const std::vector<double>& step_seconds) const;
};

}  // namespace headroom
