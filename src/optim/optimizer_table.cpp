#include "optim/optimizer_table.h"

#include <headroom/core/error.h>
#include "core/nearest_name.h"
#include "optim/adafactor.h"
#include "optim/adam.h"
#include "optim/adamw_8bit.h"
#include "optim/sgd.h"

#include <algorithm>

namespace headroom {

const std::vector<OptimizerRow>& optimizer_table() {
  static const std::vector<OptimizerRow> table = {sgd_row(), adam_row(), adamw_row(),
                                                  adafactor_row(), adamw_8bit_row()};
  return table;
}

const OptimizerRow& optimizer_row(const std::string& name) {
  for (const OptimizerRow& row : optimizer_table()) {
    if (name == row.name) return row;
  }
  throw ConfigError(unknown_name("optimizer", name, optimizer_names()));
}

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const OptimizerRow& row : optimizer_table()) all.emplace_back(row.name);
    return all;
  }();
  return names;
}

std::unique_ptr<LeanOptimizer> make_optimizer(const OptimizerConfig& config,
                                              const NamedParameters& parameters,
                                              const KeepFp32State& keep_fp32_state) {
  return optimizer_row(config.name).make(config, parameters, keep_fp32_state);
}

std::int64_t optimizer_state_bytes(const OptimizerConfig& config, const ParameterShapes& shapes) {
  const OptimizerRow& row = optimizer_row(config.name);
  std::int64_t total = 0;
  for (const auto& shape : shapes) total += row.state_bytes(config, shape);
  return total;
}

bool has_independent_elements(const std::string& name) {
  return optimizer_row(name).has_independent_elements;
}

ParameterShapes shapes_of(const std::vector<at::Tensor>& parameters) {
  ParameterShapes shapes;
  for (const at::Tensor& parameter : parameters) shapes.push_back(parameter.sizes().vec());
  return shapes;
}

std::vector<LeanerOptimizer> leaner_optimizers(const OptimizerConfig& config,
                                               const ParameterShapes& shapes) {
  const std::int64_t now = optimizer_state_bytes(config, shapes);
  std::vector<LeanerOptimizer> leaner;
  for (const std::string& name : optimizer_names()) {
    OptimizerConfig other = config;
    other.name = name;
    const std::int64_t saved = now - optimizer_state_bytes(other, shapes);
    if (saved > 0) leaner.push_back({name, saved});
  }
  std::stable_sort(leaner.begin(), leaner.end(),
                   [](const LeanerOptimizer& a, const LeanerOptimizer& b) {
                     return a.saved_bytes < b.saved_bytes;
                   });
  return leaner;
}

}  // namespace headroom
