#pragma once

// The snapshots of a run: when they are written, with what, and how one is continued.

#include "train/rank_group.h"
#include "train/run_settings.h"
#include "train/snapshot.h"

#include <cstdint>
#include <string>

namespace headroom {

class Snapshots {
 public:
  /// Finds the snapshot to resume from, on rank 0. Throws SnapshotError when there is none where
  /// one was asked for. Collective, like save() and restore().
  Snapshots(const RunSettings& settings, const Chain& chain, const RankGroup& ranks);

  /// The snapshot to resume from; empty: the run is a new one.
  const std::string& source() const { return source_; }
  /// Where the run of that snapshot stood; the start of a run without one. Every byte is checked.
  TrainingPosition position() const;
  /// Brings weights, buffers, optimizer and random state back. Requires a source.
  TrainingPosition restore(torch::optim::Optimizer& optimizer) const;

  /// Whether --save_steps asks for a snapshot after this update.
  bool are_due(std::int64_t update) const;
  /// Writes a snapshot that holds the random state of every rank, and returns its folder on every
  /// rank. Throws SnapshotError on every rank when rank 0 cannot write it.
  std::string save(TrainingPosition position, const torch::optim::Optimizer& optimizer) const;
  /// The same, but a snapshot that cannot be written is a warning: training goes on.
  void save_or_warn(const TrainingPosition& position,
                    const torch::optim::Optimizer& optimizer) const;

 private:
  const RunSettings& settings_;
  const Chain& chain_;
  const RankGroup& ranks_;
  std::string source_;
};

}  // namespace headroom
