#include "train/best_model.h"

#include <headroom/core/error.h>
#include <headroom/model/pretrained.h>
#include <headroom/model/safetensors.h>
#include "model/published.h"
#include "model/trained_weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

namespace headroom {
namespace {

struct Metric {
  const char* name;
  std::optional<double> (*value)(const EvalResults& results);
  bool greater_is_better;
};
constexpr Metric kMetrics[] = {
    {"loss", [](const EvalResults& r) { return std::optional<double>(r.loss); }, false},
    {"accuracy", [](const EvalResults& r) { return r.accuracy; }, true},
    {"f1", [](const EvalResults& r) { return r.f1; }, true},
    {"perplexity", [](const EvalResults& r) { return r.perplexity; }, false}};

bool is_better(const std::string& name, double value, double than) {
  for (const Metric& metric : kMetrics) {
    if (name == metric.name) return metric.greater_is_better ? value > than : value < than;
  }
  return false;
}

// What is kept of models that load_weights() does not fill, with adapters and of TorchScript: what
// training changes.
std::vector<std::pair<std::string, at::Tensor>> own_tensors(const Chain& chain) {
  const ModelFormat* format = chain.format().get();
  if (format == nullptr || dynamic_cast<const PublishedFormat*>(format) != nullptr) return {};
  return trained_weights(chain).tensors;
}

std::string tensors_file(const std::string& folder) { return folder + "/tensors.safetensors"; }

void save_weights(const Chain& chain, const std::string& folder) {
  const auto tensors = own_tensors(chain);
  if (tensors.empty()) {
    save_pretrained(chain, folder);
    return;
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw ConfigError(fmt::format("'{}' cannot be made: {}", folder, error.message()));
  const torch::NoGradGuard no_grad;
  save_safetensors(tensors_file(folder), tensors);
}

void restore_weights(const Chain& chain, const std::string& folder) {
  const torch::NoGradGuard no_grad;
  const auto tensors = own_tensors(chain);
  if (tensors.empty()) {
    load_weights(chain, folder);
  } else {
    load_safetensors(tensors_file(folder), tensors);
  }
}

}  // namespace

double metric_of(const EvalResults& results, const std::string& name) {
  std::vector<std::string> known;
  for (const Metric& metric : kMetrics) {
    const std::optional<double> value = metric.value(results);
    if (value && name == metric.name) return *value;
    if (value) known.emplace_back(metric.name);
  }
  throw ConfigError(fmt::format("--metric_for_best_model {}: the evaluation of this model gives {}",
                                name, fmt::join(known, ", ")));
}

BestModel::BestModel(const RunSettings& settings, const Chain& chain, const RankGroup& ranks)
    : settings_(settings), chain_(chain), ranks_(ranks) {}

std::string BestModel::folder(std::int64_t update) const {
  if (!settings_.arguments.load_best_model_at_end) return "";
  return fmt::format("{}/best-{}", settings_.arguments.output_dir, update);
}

void BestModel::add(const EvalResults& results, TrainingPosition& position) const {
  const std::string& name = settings_.arguments.metric_for_best_model;
  const double value = metric_of(results, name);
  if (position.best && !is_better(name, value, position.best->metric)) {
    ++position.num_evaluations_since_best;
    return;
  }
  const std::string before = position.best ? folder(position.best->update) : "";
  position.best = {value, position.global_step};
  position.num_evaluations_since_best = 0;
  const std::string now = folder(position.global_step);
  if (now.empty() || !ranks_.is_first()) return;
  save_weights(chain_, now);
  std::error_code ignored;
  if (!before.empty() && before != now) std::filesystem::remove_all(before, ignored);
}

bool BestModel::is_patience_over(const TrainingPosition& position) const {
  const std::int64_t patience = settings_.arguments.early_stopping_patience;
  return patience > 0 && position.num_evaluations_since_best >= patience;
}

void BestModel::restore(const TrainingPosition& position) const {
  if (!position.best || folder(0).empty() || position.best->update == position.global_step) return;
  if (ranks_.is_first()) restore_weights(chain_, folder(position.best->update));
  ranks_.share_weights(chain_);
}

}  // namespace headroom
