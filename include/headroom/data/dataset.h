#pragma once

#include <headroom/core/micro_batch.h>

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// Samples by number. Reading is const and safe from several threads.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// Of one epoch.
  virtual std::int64_t size() const = 0;

  /// True: each epoch has samples of its own, and epoch e reads the numbers from e x size() on.
  /// False: every epoch reads the same.
  virtual bool resamples_each_epoch() const { return false; }

  /// The samples `indices` as one micro-batch, in that order.
  virtual MicroBatch load(c10::ArrayRef<std::int64_t> indices) const = 0;

  /// Items in these samples, without loading them.
  virtual std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const {
    return static_cast<std::int64_t>(indices.size());
  }

  /// How long a sample is before padding, so that samples of like length can be grouped; 0 where
  /// all are alike.
  virtual std::int64_t length_of(std::int64_t /*index*/) const { return 0; }

  /// These samples will be loaded soon, in this order, each once. A hint: data whose samples take
  /// time to read begins with them on threads of its own, outside of tensor memory.
  virtual void expect(c10::ArrayRef<std::int64_t> /*indices*/) const {}
};

/// Images with labels from a folder in the IDX format, plain or gzip:
/// {train|t10k}-{images-idx3|labels-idx1}-ubyte[.gz]. Pixels become floats in [0, 1], (B, 1, rows,
/// columns). The file's bytes stay as they are and outside of tensor memory; a batch is converted
/// straight from them, with no copy between. Throws DataError naming file, offset and expectation
/// when a file is missing, truncated, corrupt, empty or does not match the other, or when a label
/// is not below `num_classes`.
std::unique_ptr<Dataset> open_idx_images(const std::string& folder, bool train,
                                         std::int64_t num_classes = 256);

/// Normally distributed images (channels, rows, columns) with uniform labels, the same for the same
/// seed and index.
std::unique_ptr<Dataset> make_synthetic_images(std::int64_t num_samples, std::int64_t channels,
                                               std::int64_t rows, std::int64_t columns,
                                               std::int64_t num_classes, std::uint64_t seed);

/// What a masked-language model is to guess: of each sample exactly `num_masked` tokens, so that
/// all samples have the same shapes. Which they are, and what becomes of them, depends on the seed
/// and the sample's number alone. Of the chosen ones 8 in 10 become `mask_token`, 1 in 10 a token
/// drawn from the whole vocabulary, and the others stay. Inputs are (B, length), targets what the
/// chosen tokens were (B, num_masked) and their positions (B, num_masked), rising; items are the
/// chosen tokens.
struct Masking {
  std::int64_t num_masked = 1;
  std::int64_t mask_token = 0;
  std::uint64_t seed = 0;
};

/// Uniformly distributed tokens: inputs (B, length) and, one place further on, targets (B, length).
/// With `masking`, samples of a masked-language model.
std::unique_ptr<Dataset> make_synthetic_tokens(std::int64_t num_samples, std::int64_t length,
                                               std::int64_t vocabulary, std::uint64_t seed,
                                               const std::optional<Masking>& masking = {});

/// Pairs of a normally distributed image and uniformly distributed tokens: inputs are images (B,
/// channels, rows, columns), tokens (B, length) and the place of each text's end (B, 1), where the
/// last token of the vocabulary stands. There are no targets.
std::unique_ptr<Dataset> make_synthetic_pairs(std::int64_t num_samples, std::int64_t channels,
                                              std::int64_t rows, std::int64_t columns,
                                              std::int64_t length, std::int64_t vocabulary,
                                              std::uint64_t seed);

/// Targets with this value are padding: the loss leaves them out (as LibTorch's cross_entropy does
/// by default).
inline constexpr std::int64_t kIgnoreIndex = -100;

/// Says what the loss of a micro-batch is averaged over. Sees the tensors and num_samples;
/// num_items is not set yet.
using ItemCount = std::function<std::int64_t(const MicroBatch&)>;

/// The targets[0] that are not `ignore_index` when they are integers (classes, or tokens: padding
/// is left out); otherwise the samples.
std::int64_t count_items(const MicroBatch& micro, std::int64_t ignore_index = kIgnoreIndex);

/// As few parts of at most `max_size` as hold `total`, as equal as they can be, larger ones first:
/// 64 by 24 is 22, 21, 21. Empty for a total of 0. Throws ConfigError for a negative total or
/// max_size < 1.
std::vector<std::int64_t> balanced_sizes(std::int64_t total, std::int64_t max_size);

/// Cuts a batch along the samples into micro-batches of balanced_sizes(). They are views: nothing
/// is copied, and they share the batch's memory. Items are counted by `count`, or by count_items()
/// when it is empty. Undefined tensors stay undefined. Throws DataError when a tensor's dimension 0
/// is not num_samples, or when the items of the parts do not add up to a batch.num_items that was
/// given (not 0): the weights would be wrong. Throws ConfigError when max_micro_batch < 1.
std::vector<MicroBatch> split(const MicroBatch& batch, std::int64_t max_micro_batch,
                              const ItemCount& count = {});

}  // namespace headroom
