#pragma once

#include <headroom/core/micro_batch.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace headroom {

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
