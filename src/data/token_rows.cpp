#include "data/token_rows.h"

#include <headroom/core/error.h>

#include "core/counter_random.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

namespace headroom {
namespace {

at::Tensor make_tokens(std::size_t num_samples, std::int64_t length) {
  return at::empty({static_cast<std::int64_t>(num_samples), length}, at::kLong);
}

// Inputs, and targets one place further on.
class NextTokens final : public Dataset {
 public:
  NextTokens(std::unique_ptr<const TokenRows> rows, std::int64_t length)
      : rows_(std::move(rows)), length_(length) {}

  std::int64_t size() const override { return rows_->size(); }
  bool resamples_each_epoch() const override { return rows_->resamples_each_epoch(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const at::Tensor inputs = make_tokens(indices.size(), length_),
                     targets = make_tokens(indices.size(), length_);
    std::vector<std::int64_t> row(static_cast<std::size_t>(length_ + 1));
    const std::size_t num_bytes = static_cast<std::size_t>(length_) * sizeof(std::int64_t);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      rows_->read(indices[i], length_ + 1, row.data());
      const std::int64_t at = static_cast<std::int64_t>(i) * length_;
      std::memcpy(inputs.data_ptr<std::int64_t>() + at, row.data(), num_bytes);
      std::memcpy(targets.data_ptr<std::int64_t>() + at, row.data() + 1, num_bytes);
    }
    const auto count = static_cast<std::int64_t>(indices.size());
    return {{inputs}, {targets}, count, count * length_};
  }

  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    return static_cast<std::int64_t>(indices.size()) * length_;
  }

 private:
  std::unique_ptr<const TokenRows> rows_;
  std::int64_t length_;
};

class MaskedTokens final : public Dataset {
 public:
  MaskedTokens(std::unique_ptr<const TokenRows> rows, std::int64_t length, std::int64_t vocabulary,
               const Masking& masking)
      : rows_(std::move(rows)), length_(length), vocabulary_(vocabulary), masking_(masking) {}

  std::int64_t size() const override { return rows_->size(); }
  bool resamples_each_epoch() const override { return rows_->resamples_each_epoch(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const std::int64_t chosen = masking_.num_masked;
    const at::Tensor inputs = make_tokens(indices.size(), length_);
    const at::Tensor targets = make_tokens(indices.size(), chosen),
                     positions = make_tokens(indices.size(), chosen);
    std::vector<std::int64_t> order(static_cast<std::size_t>(length_));
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const auto sample = static_cast<std::int64_t>(i);
      std::int64_t* tokens = inputs.data_ptr<std::int64_t>() + sample * length_;
      rows_->read(indices[i], length_, tokens);
      mask(indices[i], tokens, targets.data_ptr<std::int64_t>() + sample * chosen,
           positions.data_ptr<std::int64_t>() + sample * chosen, order);
    }
    const auto count = static_cast<std::int64_t>(indices.size());
    return {{inputs}, {targets, positions}, count, count * chosen};
  }

  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    return static_cast<std::int64_t>(indices.size()) * masking_.num_masked;
  }

 private:
  // The first num_masked places of a shuffle, then for each what becomes of its token. All draws of
  // a sample are numbered.
  void mask(std::int64_t index, std::int64_t* tokens, std::int64_t* targets,
            std::int64_t* positions, std::vector<std::int64_t>& order) const {
    std::int64_t number = 0;
    // Other numbers than those that made the tokens, should they be from the same seed.
    const std::uint64_t seed = ~masking_.seed;
    const auto next = [&](std::int64_t end) {
      return static_cast<std::int64_t>(draw(seed, index, number++) %
                                       static_cast<std::uint64_t>(end));
    };
    const auto chosen = static_cast<std::ptrdiff_t>(masking_.num_masked);
    std::iota(order.begin(), order.end(), 0);
    for (std::ptrdiff_t k = 0; k < chosen; ++k)
      std::swap(order[static_cast<std::size_t>(k)],
                order[static_cast<std::size_t>(k + next(length_ - k))]);
    std::sort(order.begin(), order.begin() + chosen);
    for (std::ptrdiff_t k = 0; k < chosen; ++k) {
      std::int64_t& token = tokens[order[static_cast<std::size_t>(k)]];
      positions[k] = order[static_cast<std::size_t>(k)];
      targets[k] = token;
      const std::int64_t action = next(10), random_token = next(vocabulary_);
      if (action < 8) token = masking_.mask_token;
      if (action == 8) token = random_token;
    }
  }

  std::unique_ptr<const TokenRows> rows_;
  std::int64_t length_, vocabulary_;
  Masking masking_;
};

}  // namespace

std::unique_ptr<Dataset> make_token_dataset(std::unique_ptr<const TokenRows> rows,
                                            std::int64_t length, std::int64_t vocabulary,
                                            const std::optional<Masking>& masking) {
  if (!masking) return std::make_unique<NextTokens>(std::move(rows), length);
  if (masking->num_masked < 1 || masking->num_masked > length) {
    throw ConfigError(fmt::format("{} tokens to be guessed of {}: give a number from 1 to {}",
                                  masking->num_masked, length, length));
  }
  if (masking->mask_token < 0 || masking->mask_token >= vocabulary) {
    throw ConfigError(fmt::format("mask token {} is not below the vocabulary of {}",
                                  masking->mask_token, vocabulary));
  }
  return std::make_unique<MaskedTokens>(std::move(rows), length, vocabulary, *masking);
}

}  // namespace headroom
