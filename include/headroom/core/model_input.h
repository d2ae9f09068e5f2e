#pragma once

#include <cstdint>

namespace headroom {

/// The samples that a model reads: what data is opened for.
struct ModelInput {
  enum class Kind {
    kImages,  ///< (channels, rows, columns) and a class
    kTokens,  ///< `length` tokens
    kPairs,   ///< an image and a text of `length` tokens
  };
  Kind kind = Kind::kImages;
  std::int64_t channels = 1;
  std::int64_t rows = 28;
  std::int64_t columns = 28;
  std::int64_t num_classes = 10;
  std::int64_t length = 0;      ///< tokens per sample
  std::int64_t vocabulary = 0;  ///< tokens that the model knows
  /// Tokens per sample that a masked-language model is to guess; 0: the model guesses each token's
  /// next one.
  std::int64_t num_masked = 0;
  std::int64_t mask_token = 0;  ///< stands for a token to be guessed
};

}  // namespace headroom
