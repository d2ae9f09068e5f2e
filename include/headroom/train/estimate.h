#pragma once

#include <headroom/config/training_arguments.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class Chain;
class Dataset;
class Json;

/// The memory of one training strategy.
struct EstimatedStrategy {
  std::string name;    ///< "plain", "accumulation", "checkpointing", "plan" or "paged plan"
  std::string policy;  ///< of --gradient_checkpointing: none, every, sqrt, optimal
  std::int64_t micro_batch = 0;
  std::int64_t num_micro_batches = 0;  ///< of an update, on one rank
  std::int64_t activation_bytes =
      0;  ///< most that one micro-batch holds, gradients that appear in backward included
  std::int64_t peak_bytes = 0;  ///< of everything, with the optimizer of the arguments
};

/// What training a model would occupy.
struct Estimate {
  std::string model;
  std::string optim;
  std::int64_t num_parameters = 0;
  std::int64_t global_batch = 0;    ///< over all ranks
  std::int64_t num_ranks = 1;       ///< what follows is per rank
  std::int64_t weights_bytes = 0;   ///< buffers included
  bool bytes_are_measured = false;  ///< by running stages; otherwise counted on the meta device
  std::int64_t gradients_bytes = 0;
  std::int64_t input_bytes = 0;                                   ///< of one micro-batch
  std::vector<std::pair<std::string, std::int64_t>> state_bytes;  ///< of each optimizer
  std::vector<EstimatedStrategy>
      policies;  ///< at the micro-batch of the arguments; the last is the leanest plan
  /// With --spill_dir: the least with weights, gradients and optimizer state paged, and what an
  /// update then moves. Without, the name is empty.
  EstimatedStrategy paged_floor;
  std::int64_t paged_bytes_read = 0;
  std::int64_t paged_bytes_written = 0;
  EstimatedStrategy floor;        ///< the least memory at which the global batch can be trained
  std::int64_t budget_bytes = 0;  ///< 0: none was given, and what follows is empty
  std::vector<EstimatedStrategy> strategies;  ///< that fit, the simplest first

  bool fits() const { return !strategies.empty(); }
  std::int64_t state_bytes_of(const std::string& optim) const;
};

/// Builds the model on the meta device and counts. No time is measured: plans are made as if every
/// stage took as long as any other, so that bytes are right and the choice between plans that fit
/// is a guess. Throws ConfigError on arguments that make no sense.
Estimate estimate(const TrainingArguments& arguments);

/// The same for a chain that is there, with its data. Bytes are counted on the meta device where
/// every operation of the chain has shapes there, and takes what it takes when it runs on two
/// samples; otherwise stages are run, one at a time, on as many samples as are asked about.
Estimate estimate(const TrainingArguments& arguments, const Chain& chain, const Dataset& data);

Json to_json(const Estimate& estimate);
std::string to_text(const Estimate& estimate);

}  // namespace headroom
