#pragma once

// What follows from the arguments, derived once, for training, planning, estimates and comparisons
// alike.

#include <headroom/config/accumulation_schedule.h>
#include <headroom/config/training_arguments.h>
#include <headroom/data/dataset.h>
#include <headroom/execute/executor.h>
#include <headroom/model/chain.h>
#include <headroom/optim/optimizer.h>

#include "train/windows.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace headroom {

/// How half precision is used. At most one of the types is set.
struct Precision {
  std::optional<at::ScalarType> keep_in_half;
  std::optional<at::ScalarType> compute_in_half;
  bool scales_loss = false;  ///< dynamically, as fp16 needs it
  std::string reason;        ///< one line for the user where the choice was ours; else empty
};

struct RunSettings {
  /// `ranks` share every window. Throws ConfigError on arguments that validate() refuses.
  RunSettings(TrainingArguments given, std::int64_t ranks);

  const TrainingArguments arguments;
  const std::int64_t num_ranks;
  const AccumulationSchedule schedule;
  const Precision precision;
  const OptimizerConfig optimizer;     ///< its learning rate is scaled by the batch where asked
  const std::string data_fingerprint;  ///< of the file or folder that is trained on
  /// Parameters may be updated inside backward: nothing needs all gradients at once.
  const bool may_update_in_backward;

  /// Samples of an update over all ranks, at most: the global batch.
  std::int64_t window_samples(std::int64_t epoch = 0) const;
  Grouping grouping(const Dataset& data) const;
  /// Updates of the whole run.
  std::int64_t total_updates(const Dataset& data) const;

  ExecutorOptions executor_options() const;

  /// Bytes of state that the optimizer `name` would have for this model.
  std::int64_t optimizer_bytes(const Chain& chain, const std::string& name) const;
  std::int64_t optimizer_bytes(const Chain& chain) const {
    return optimizer_bytes(chain, optimizer.name);
  }

  /// The bytes of one parameter's state, whose sizes alone are looked at.
  std::function<std::int64_t(const at::Tensor&)> state_bytes_of_parameter() const;

  /// What must be the same for a snapshot to be continued.
  std::map<std::string, std::string> resume_settings() const;
  /// What measured costs depend on, besides the shapes of samples.
  std::string cost_key(const Chain& chain) const;
  /// Explains a learning rate that is not the argument's; empty where it is.
  std::string learning_rate_note() const;
};

}  // namespace headroom
