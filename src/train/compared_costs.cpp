#include "train/compared_costs.h"

#include <headroom/model/chain.h>

#include "execute/optimizer_parameters.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

// In the place of the loss, a stage that hands out gradients: a scalar forward and one backward.
void replace_loss(StageCosts& stage) {
  constexpr std::int64_t kScalarBytes = sizeof(float);
  stage.output_bytes = kScalarBytes;
  stage.forward_ns = stage.forward_transient_bytes = stage.param_grad_bytes = 0;
  stage.carried.clear();
  for (StageOption& option : stage.options)
    option = {kScalarBytes, 0, 0, 0, kScalarBytes, /*fits=*/true};
}

// A forward through all stages but the loss that holds one boundary at a time.
struct EmbeddingCosts {
  std::int64_t ns = 0;
  std::int64_t peak_bytes = 0;
};

EmbeddingCosts embedding_costs(const ChainCosts& chain) {
  EmbeddingCosts costs;
  std::int64_t input_bytes = 0;
  for (std::size_t i = 0; i + 1 < chain.stages.size(); ++i) {
    const StageCosts& stage = chain.stages[i];
    std::int64_t new_bytes = stage.output_bytes;
    for (const CarriedBytes& part : stage.carried) new_bytes -= part.bytes;
    costs.ns += stage.forward_ns;
    costs.peak_bytes =
        std::max(costs.peak_bytes, input_bytes + new_bytes + stage.forward_transient_bytes);
    input_bytes = stage.output_bytes;
  }
  return costs;
}

}  // namespace

std::string why_whole(const Chain& chain) {
  if (!chain.couples_samples()) return {};
  if (!compares_embeddings(chain)) return "they are compared inside of its stages";
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const auto module = chain.stage(i).module();
    const auto name = module ? first_batch_norm(*module, chain.stage(i).name()) : std::nullopt;
    if (name) {
      return fmt::format("'{}' is a BatchNorm, which normalises each part by its own statistics",
                         *name);
    }
  }
  return {};
}

ComparedCosts::ComparedCosts(const Chain& chain, const RunSettings& settings,
                             const ProfileBook& book, std::int64_t window_samples,
                             std::int64_t num_samples)
    : chain_(chain),
      settings_(settings),
      book_(book),
      window_samples_(window_samples),
      num_samples_(num_samples) {
  if (!apply_to(num_samples)) return;
  if (const auto loss = chain.stage(chain.size() - 1).module()) {
    for (const at::Tensor& parameter : loss->parameters()) {
      if (parameter.requires_grad())
        early_gradient_bytes_ += static_cast<std::int64_t>(parameter.nbytes());
    }
  }
}

bool ComparedCosts::apply_to(std::int64_t micro_batch_size) const {
  return chain_.couples_samples() && (settings_.num_ranks > 1 || micro_batch_size < num_samples_);
}

const std::optional<ContrastiveLossCosts>& ComparedCosts::loss() {
  if (is_measured_) return loss_;
  is_measured_ = true;
  try {
    loss_ = measure_contrastive_loss(chain_, settings_.executor_options(), book_.load(1),
                                     window_samples_);
  } catch (const c10::OutOfMemoryError&) {
    loss_.reset();
  }
  return loss_;
}

bool ComparedCosts::fit() { return loss().has_value(); }

std::int64_t ComparedCosts::cached_bytes(std::int64_t size) {
  return apply_to(size) && fit() ? loss()->gradient_bytes : 0;
}

MicroBatchCosts ComparedCosts::of(std::int64_t size, MicroBatchCosts own) {
  const ContrastiveLossCosts& loss = *this->loss();
  const EmbeddingCosts embedding = embedding_costs(own.chain);
  // At most what small tensors travel in, so that it is no matter that all ranks' are counted.
  const std::int64_t exchange_bytes =
      settings_.num_ranks > 1 ? std::min<std::int64_t>(loss.embedding_bytes, std::int64_t{1} << 20)
                              : 0;
  MicroBatchCosts costs = std::move(own);
  costs.prepare_ns = embedding.ns + loss.ns * size / num_samples_;
  costs.prepare_bytes = std::max(
      loss.embedding_bytes + std::max(costs.input_bytes + embedding.peak_bytes, exchange_bytes),
      loss.peak_bytes);
  costs.input_bytes += loss.gradient_bytes;
  replace_loss(costs.chain.stages.back());
  return costs;
}

}  // namespace headroom
