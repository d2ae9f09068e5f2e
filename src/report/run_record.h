#pragma once

#include <headroom/report/results.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// What a run left in its output folder, as plain values. Numbers that are not there, or not
/// finite, are NaN.
struct RunRecord {
  struct Update {
    std::int64_t step = 0;
    double loss = 0.0;
    double learning_rate = 0.0;
  };
  struct Evaluation {
    std::int64_t step = 0;
    double loss = 0.0;
  };
  struct Stage {
    std::string name;
    std::string decision;
    std::int64_t kept_bytes = 0;
    double extra_seconds = 0.0;  ///< against keeping everything
  };
  /// One operation of a micro-batch.
  struct Moment {
    std::string operation;                               ///< such as "backward of block3"
    std::map<std::string, std::int64_t> bytes_by_owner;  ///< measured, after the operation
    std::int64_t peak_bytes =
        0;  ///< most bytes within it: what was live before plus what the plan predicts
  };

  std::string name;  ///< of the folder
  TrainResults results;
  std::vector<Update> updates;  ///< those that were logged
  std::vector<Evaluation> evaluations;
  std::string policy;  ///< of the plan; empty: nothing was predicted, and what follows is empty
  std::vector<Stage> stages;  ///< of the plan
  /// By weights, gradients and optimizer state that are paged, in one update; 0: none are.
  std::int64_t paged_bytes_read = 0, paged_bytes_written = 0;
  std::vector<Moment> timeline;  ///< of one micro-batch
  std::vector<std::pair<std::string, std::string>>
      settings;  ///< flags that differ from their defaults, with their values
};

/// Reads train_results.json, plan.json, metrics.jsonl (absent with --report_to none) and
/// training_args.json (absent in older runs) of an output folder. Throws DataError naming the file
/// when it is missing or not what a run writes.
RunRecord read_run(const std::string& folder);

}  // namespace headroom
