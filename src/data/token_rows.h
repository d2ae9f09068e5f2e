#pragma once

// Rows of tokens, before it is settled what a model is to learn of them.

#include <headroom/data/dataset.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace headroom {

/// Reading is const and safe from several threads.
class TokenRows {
 public:
  virtual ~TokenRows() = default;
  virtual std::int64_t size() const = 0;
  virtual bool resamples_each_epoch() const { return false; }
  /// The first `count` tokens of row `index`, each in [0, vocabulary).
  virtual void read(std::int64_t index, std::int64_t count, std::int64_t* out) const = 0;
};

/// Samples of `length` tokens: each token's next one is to be guessed, or with `masking` the chosen
/// ones. Loading allocates what it returns and no other tensor. Throws ConfigError when the masking
/// does not fit.
std::unique_ptr<Dataset> make_token_dataset(std::unique_ptr<const TokenRows> rows,
                                            std::int64_t length, std::int64_t vocabulary,
                                            const std::optional<Masking>& masking);

}  // namespace headroom
