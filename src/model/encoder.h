#pragma once

#include <cstdint>

namespace headroom {

/// What the encoders of the zoo (BERT, ViT) share, by Hugging Face's words.
struct EncoderConfig {
  std::int64_t hidden_size = 128;
  std::int64_t num_hidden_layers = 6;
  std::int64_t num_attention_heads = 4;
  std::int64_t intermediate_size = 512;
  double hidden_dropout_prob = 0.0;           ///< of embeddings and what each half of a block adds
  double attention_probs_dropout_prob = 0.0;  ///< of attention weights
};

}  // namespace headroom
