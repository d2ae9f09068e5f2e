#pragma once

#include <headroom/model/chain.h>

namespace headroom {

/// For a last stage to derive from, beside Stage, that couples samples (Stage::couples_samples) and
/// whose forward depends on nothing but its inputs (dimension 0 of each is the sample), its
/// parameters and micro.num_samples: a loss over embeddings. A global batch can then be split all
/// the same; docs/contrastive.md says how.
class EmbeddingLoss {
 public:
  virtual ~EmbeddingLoss() = default;
};

/// True when the last stage, and no other, couples samples, and is an EmbeddingLoss.
bool compares_embeddings(const Chain& chain);

}  // namespace headroom
