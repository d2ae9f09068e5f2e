#pragma once

// The table of optimizers. To add one: a file with the optimizer and its row, and a line in
// optimizer_table.cpp.

#include <headroom/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace headroom {

/// What is known of an optimizer before one is made.
struct OptimizerRow {
  const char* name;
  const char* help;  ///< what it keeps, in a few words
  std::unique_ptr<LeanOptimizer> (*make)(const OptimizerConfig& config,
                                         const NamedParameters& parameters,
                                         const KeepFp32State& keep_fp32_state);
  /// Bytes of state for one float parameter of this shape.
  std::int64_t (*state_bytes)(const OptimizerConfig& config,
                              const std::vector<std::int64_t>& shape);
  /// See has_independent_elements().
  bool has_independent_elements = false;
};

/// Every row, in the order of the documentation.
const std::vector<OptimizerRow>& optimizer_table();

/// Throws ConfigError on an unknown name, naming the nearest.
const OptimizerRow& optimizer_row(const std::string& name);

/// The sizes of parameters, in order.
ParameterShapes shapes_of(const std::vector<at::Tensor>& parameters);

/// An optimizer that would keep less state.
struct LeanerOptimizer {
  std::string name;
  std::int64_t saved_bytes;
};

/// The optimizers that keep fewer bytes of state than config's, the one that saves least first.
std::vector<LeanerOptimizer> leaner_optimizers(const OptimizerConfig& config,
                                               const ParameterShapes& shapes);

}  // namespace headroom
