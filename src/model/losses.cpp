#include <headroom/core/error.h>
#include <headroom/model/chain.h>
#include "core/nearest_name.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

namespace F = torch::nn::functional;

struct LossRow {
  const char* name;
  LossKind kind;
};
constexpr LossRow kLosses[] = {{"cross_entropy", LossKind::kCrossEntropy},
                               {"mse", LossKind::kMse},
                               {"bce_with_logits", LossKind::kBceWithLogits},
                               {"model", LossKind::kModel}};

const at::Tensor& targets_of(const MicroBatch& micro) {
  if (micro.targets.empty())
    throw DataError(
        "the data has no targets for the loss to compare with: give --loss model, or "
        "data with targets");
  return micro.targets[0];
}

// Scores are (B, classes, ...) for targets (B, ...), or (B, ..., classes) as language models give
// them.
at::Tensor cross_entropy_of_scores(const std::vector<at::Tensor>& outputs,
                                   const MicroBatch& micro) {
  const at::Tensor& targets = targets_of(micro);
  at::Tensor scores = outputs.at(0);
  if (scores.dim() == targets.dim() + 1 && scores.dim() > 2) {
    std::vector<std::int64_t> places = scores.sizes().vec();
    places.erase(places.begin() + 1);
    if (targets.sizes() != at::IntArrayRef(places)) scores = scores.movedim(-1, 1);
  }
  return F::cross_entropy(scores, targets, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

at::Tensor like_outputs(const at::Tensor& output, const MicroBatch& micro) {
  const at::Tensor& targets = targets_of(micro);
  if (output.numel() != targets.numel()) {
    throw DataError(fmt::format("the model returns {} values for {} targets ({} samples)",
                                output.numel(), targets.numel(), micro.num_samples));
  }
  return targets.to(output.scalar_type()).reshape(output.sizes());
}

// Averaged over the elements of a sample, summed over the samples.
at::Tensor per_sample(const at::Tensor& sum, const at::Tensor& output, const MicroBatch& micro) {
  const double elements = static_cast<double>(output.numel()) /
                          static_cast<double>(std::max<std::int64_t>(1, micro.num_items));
  return sum / elements;
}

at::Tensor mse(const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
  const at::Tensor& output = outputs.at(0);
  return per_sample(F::mse_loss(output, like_outputs(output, micro),
                                F::MSELossFuncOptions().reduction(torch::kSum)),
                    output, micro);
}

at::Tensor bce_with_logits(const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
  const at::Tensor& output = outputs.at(0);
  return per_sample(F::binary_cross_entropy_with_logits(
                        output, like_outputs(output, micro),
                        F::BinaryCrossEntropyWithLogitsFuncOptions().reduction(torch::kSum)),
                    output, micro);
}

}  // namespace

Chain::Loss make_loss(LossKind kind) {
  switch (kind) {
    case LossKind::kCrossEntropy:
      return cross_entropy_of_scores;
    case LossKind::kMse:
      return mse;
    case LossKind::kBceWithLogits:
      return bce_with_logits;
    case LossKind::kModel:
      break;
  }
  throw ConfigError("the loss 'model' is what a model returns: it cannot be had without one");
}

std::vector<std::string> loss_names() {
  std::vector<std::string> names;
  for (const LossRow& row : kLosses) names.emplace_back(row.name);
  return names;
}

LossKind parse_loss(const std::string& name) {
  for (const LossRow& row : kLosses) {
    if (name == row.name) return row.kind;
  }
  throw ConfigError(fmt::format("--loss '{}': expected one of {}; did you mean '{}'?", name,
                                fmt::join(loss_names(), ", "), nearest_name(name, loss_names())));
}

}  // namespace headroom
