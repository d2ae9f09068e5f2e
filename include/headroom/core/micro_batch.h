#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace headroom {

/// The samples that a model reads: what data is opened for.
struct ModelInput {
  enum class Kind {
    kImages,  ///< (channels, rows, columns) and a class
    kTokens,  ///< `length` tokens
    kPairs,   ///< an image and a text of `length` tokens
    kTexts,   ///< a text of at most `length` tokens, and a class
  };
  Kind kind = Kind::kImages;
  std::int64_t channels = 1;
  std::int64_t rows = 28;
  std::int64_t columns = 28;
  /// What is subtracted from each channel of pixels in [0, 1], and divides it; empty: 0 and 1.
  std::vector<double> pixel_mean, pixel_deviation;
  std::int64_t num_classes = 10;
  std::int64_t length = 0;      ///< tokens per sample
  std::int64_t vocabulary = 0;  ///< tokens that the model knows
  /// Tokens per sample that a masked-language model is to guess; 0: the model guesses each token's
  /// next one.
  std::int64_t num_masked = 0;
  std::int64_t mask_token = 0;  ///< stands for a token to be guessed
  /// Every token sees all others, so that padding has to be hidden, and a text is judged by its
  /// first token. Otherwise a token sees those before it, and a text is judged by its last one.
  bool sees_all_tokens = false;
};

/// Some samples with what the model reads of them. A batch and the micro-batches cut from it have
/// the same form.
struct MicroBatch {
  std::vector<at::Tensor> inputs;   ///< what the first stage is given; dimension 0 is the sample
  std::vector<at::Tensor> targets;  ///< what the loss is given; dimension 0 is the sample
  std::int64_t num_samples = 0;
  std::int64_t num_items =
      0;  ///< what the loss is averaged over: samples, or tokens that are not padding
};

}  // namespace headroom
