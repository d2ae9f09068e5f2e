#pragma once

#include <headroom/model/chain.h>
#include <headroom/optim/grad_scaler.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace headroom {

/// The best evaluation of a run.
struct BestEvaluation {
  double metric = 0.0;
  std::int64_t update = 0;  ///< after which it was made
};

/// Where a run stands, besides weights, optimizer and random state.
struct TrainingPosition {
  std::int64_t global_step = 0;
  std::int64_t micro_batch = 0;
  std::map<std::string, std::int64_t>
      micro_batch_by_shape;  ///< for the buckets of shapes that were met
  double loss_sum = 0.0;     ///< of the updates so far
  std::int64_t num_skipped_updates = 0;
  std::optional<BestEvaluation> best;
  std::int64_t num_evaluations_since_best = 0;
  GradScalerState scaler;
  std::vector<std::string> random_states;       ///< of the CPU generator, by rank
  std::map<std::string, std::string> settings;  ///< what must be the same for a run to go on
};

/// Writes output_dir/snapshot-N so that it is there whole or not at all, also in the place of
/// another of that number, and then removes those beyond `total_limit` (0: keeps all) that were
/// written first. Returns its folder. Throws SnapshotError, naming the path, when it cannot be
/// written; what was there is whole then.
std::string save_snapshot(const std::string& output_dir, const Chain& chain,
                          const torch::optim::Optimizer& optimizer,
                          const TrainingPosition& position, std::int64_t total_limit);

/// Restores weights, buffers and optimizer; random states are left to the caller. Every byte is
/// checked against its SHA-256 first: nothing is changed when the snapshot is unreadable, corrupt
/// or was made with other settings; then throws SnapshotError naming what is wrong.
TrainingPosition load_snapshot(const std::string& folder, const Chain& chain,
                               torch::optim::Optimizer& optimizer,
                               const std::map<std::string, std::string>& settings);

/// Where the run of a snapshot stood, so that a resumed one can split in the same way. Checks what
/// it reads as load_snapshot does.
TrainingPosition snapshot_position(const std::string& folder,
                                   const std::map<std::string, std::string>& settings);

/// The snapshot of an output folder that was written last, by this run or another, and is whole:
/// broken ones are skipped with a warning. Throws SnapshotError when there is none.
std::string last_snapshot(const std::string& output_dir);

}  // namespace headroom
