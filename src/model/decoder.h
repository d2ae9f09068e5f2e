#pragma once

// What generating text asks of the first and the last stage of a language model. The stages between
// are BlockStages.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace headroom {

class DecoderEmbedding {
 public:
  virtual ~DecoderEmbedding() = default;
  /// tokens (1, T) int64 at positions [first, first + T) as (1, T, C).
  virtual at::Tensor embed(const at::Tensor& tokens, std::int64_t first) const = 0;
  /// The most tokens in a row.
  virtual std::int64_t num_positions() const = 0;
};

class DecoderHead {
 public:
  virtual ~DecoderHead() = default;
  /// Scores of the token after the last of x (1, T, C), (V).
  virtual at::Tensor next_scores(const at::Tensor& x) const = 0;
};

}  // namespace headroom
