#pragma once

// What a run leaves in its output folder and shows while it trains. Rank 0 alone writes and shows;
// on every other rank all of this does nothing.

#include <headroom/config/training_arguments.h>
#include <headroom/report/results.h>
#include <headroom/train/run_plan.h>

#include "train/run_lock.h"
#include "train/run_log.h"
#include "train/run_planner.h"
#include "train/snapshot.h"
#include "train/timeline.h"
#include "train/update.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class Json;

class RunWriter {
 public:
  /// `is_silent`: as on every rank but the first. Otherwise makes the output folder and locks it
  /// for this run: throws ConfigError when it cannot be made or written, or another run has it.
  RunWriter(const TrainingArguments& arguments, bool is_silent);

  /// What a disk did is shown in the trace.
  void watch_disk(std::function<std::vector<TransferRecord>()> transfers) {
    transfers_ = std::move(transfers);
  }

  void tell(const std::string& message) const;
  void warn(const std::string& message) const;

  /// The arguments and the plan that the run starts with.
  void describe(const RunPlan& plan);
  /// A plan that was made later.
  void add(const PlanNews& news, const RunPlan& plan);

  /// Starts the log of updates `first_step` + 1 to `total_steps`. Required by what follows.
  void start(std::int64_t first_step, std::int64_t total_steps);
  bool has_log() const { return log_ != nullptr; }
  const RunLog& log() const { return *log_; }

  /// Around each update. The operations of the first one are recorded where its plan was predicted.
  void start_update(const RunPlan& plan);
  void on_operation(std::size_t operation, bool has_planned_size);
  void on_undo();
  void add(const Update& update, const TrainingPosition& position, double epochs,
           const RunPlan& plan);
  void add(const EvalResults& eval, std::int64_t step, double epochs);
  /// Clears the progress line.
  void finish();

  void write(const TrainResults& results) const;
  /// Leaves the model in the output folder, unless the arguments say otherwise, and writes the
  /// results with its hash.
  void save_model(const Chain& chain, TrainResults& results) const;

 private:
  void write(const std::string& name, const Json& json) const;

  const TrainingArguments& arguments_;
  const bool is_silent_;
  std::unique_ptr<RunLock> lock_;  // none where it is silent
  std::unique_ptr<RunLog> log_;
  std::int64_t total_steps_ = 0;
  std::function<std::vector<TransferRecord>()> transfers_;
  Timeline timeline_;  // of the first update, for plan.json and trace.json
};

}  // namespace headroom
