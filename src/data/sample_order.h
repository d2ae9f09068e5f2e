#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace headroom {

/// The samples of an epoch in the order in which they are trained: 0, 1, 2, ..., or a permutation
/// that depends on their number, seed and epoch alone. Takes at most a MiB, however many there are.
class SampleOrder {
 public:
  /// Up to here a permutation is a table.
  static constexpr std::int64_t kMostInTable = std::int64_t{1} << 17;

  /// Of no samples.
  SampleOrder() = default;
  SampleOrder(std::int64_t num_samples, bool shuffle, std::uint64_t seed, std::int64_t epoch);
  /// An order as it is given: a table of any size.
  explicit SampleOrder(std::vector<std::int64_t> order)
      : size_(static_cast<std::int64_t>(order.size())), table_(std::move(order)) {}

  std::int64_t size() const { return size_; }
  /// The sample at a place from 0 to below size().
  std::int64_t operator[](std::int64_t place) const;

 private:
  std::uint64_t permuted(std::uint64_t place) const;

  std::int64_t size_ = 0;
  std::vector<std::int64_t> table_;
  int half_bits_ = 0;  ///< of a place, where a cipher permutes; 0: the order is that of the samples
  std::uint64_t key_ = 0;
};

}  // namespace headroom
