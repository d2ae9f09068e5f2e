#pragma once

// What a run writes and shows while it trains: metrics.jsonl, TensorBoard, the progress line.

#include <headroom/config/training_arguments.h>
#include <headroom/report/results.h>
#include "memory/device_clock.h"
#include "report/progress.h"
#include "report/tensorboard.h"

#include "train/snapshot.h"
#include "train/update.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

namespace headroom {

class RunLog {
 public:
  /// Silent: counts and times, but writes and shows nothing, as on every rank but the first.
  RunLog(const TrainingArguments& arguments, std::int64_t first_step, std::int64_t total_steps,
         bool silent);

  void start_update() { update_started_ = Clock::now(); }
  /// `position` is that after the update, `epochs` the epochs done.
  void end_update(const Update& update, const TrainingPosition& position, double epochs);
  void add_evaluation(const EvalResults& eval, std::int64_t step, double epochs);
  /// Clears the progress line.
  void finish() { progress_.finish(); }

  double seconds() const;                ///< since the start
  double median_update_seconds() const;  ///< 0 before the first
  std::int64_t num_samples() const { return num_samples_; }
  double last_loss() const { return last_loss_; }
  std::int64_t first_step() const { return first_step_; }

 private:
  using Clock = DeviceClock;

  void write_metrics(const Update& update, const TrainingPosition& position, double epochs);

  bool is_shown_;
  std::int64_t logging_steps_;
  std::int64_t first_step_;
  std::int64_t total_steps_;
  JsonLines metrics_;
  TensorBoardWriter board_;
  Progress progress_;
  Clock::time_point started_ = Clock::now();
  Clock::time_point update_started_ = started_;
  std::vector<double> update_seconds_;
  std::int64_t num_samples_ = 0;
  double last_loss_ = std::nan("");
};

}  // namespace headroom
