#pragma once

// What a micro-batch costs whose loss compares it with all others of its window.

#include <headroom/model/chain.h>
#include <headroom/plan/search.h>
#include "execute/contrastive_executor.h"

#include "train/profile_book.h"
#include "train/run_settings.h"

#include <cstdint>
#include <optional>
#include <string>

namespace headroom {

/// Why a global batch of this chain must stay in one piece; empty when it may be split.
std::string why_whole(const Chain& chain);

class ComparedCosts {
 public:
  /// For windows of `window_samples` over all ranks, of which this rank has `num_samples`.
  /// Everything given must outlive it.
  ComparedCosts(const Chain& chain, const RunSettings& settings, const ProfileBook& book,
                std::int64_t window_samples, std::int64_t num_samples);

  /// True when micro-batches of this size are compared with others, and so are not a window.
  bool apply_to(std::int64_t micro_batch_size) const;
  /// False when the embeddings of all samples do not fit under the meter's cap.
  bool fit();
  /// Given the costs of a micro-batch of `size` with a loss of its own. Only where they fit.
  MicroBatchCosts of(std::int64_t size, MicroBatchCosts own);

  /// Gradients that are there before the first micro-batch runs backward.
  std::int64_t early_gradient_bytes() const { return early_gradient_bytes_; }
  /// Of the gradients of the embeddings, which are part of MicroBatchCosts::input_bytes.
  std::int64_t cached_bytes(std::int64_t size);

 private:
  const std::optional<ContrastiveLossCosts>& loss();

  const Chain& chain_;
  const RunSettings& settings_;
  const ProfileBook& book_;
  std::int64_t window_samples_;
  std::int64_t num_samples_;
  std::int64_t early_gradient_bytes_ = 0;
  bool is_measured_ = false;
  std::optional<ContrastiveLossCosts> loss_;  // nothing: not measured, or too large
};

}  // namespace headroom
