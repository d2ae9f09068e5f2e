#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace headroom {

/// Which pairs of tokens become one, and in what order: a hash table with open addressing, because
/// a tokenizer asks it several times for each byte of text.
class PairTable {
 public:
  static constexpr std::uint32_t kNoRank = std::numeric_limits<std::uint32_t>::max();
  struct Merge {
    std::uint32_t rank = kNoRank;  ///< the smallest is made first; kNoRank: not at all
    std::int32_t token = -1;       ///< what the pair becomes
  };

  explicit PairTable(std::size_t num_pairs) {
    std::size_t size = 16;
    while (size < 2 * num_pairs) size *= 2;
    slots_.resize(size);
  }

  bool empty() const { return num_pairs_ == 0; }

  /// At most as many pairs as the constructor was told. A pair that is there keeps the later merge.
  void add(std::int32_t left, std::int32_t right, Merge merge) {
    Slot& slot = slots_[index_of(key_of(left, right))];
    if (slot.key == kFree) ++num_pairs_;
    slot = {key_of(left, right), merge};
  }

  Merge find(std::int32_t left, std::int32_t right) const {
    return slots_[index_of(key_of(left, right))].merge;
  }

 private:
  static constexpr std::uint64_t kFree = std::numeric_limits<std::uint64_t>::max();
  struct Slot {
    std::uint64_t key = kFree;
    Merge merge;
  };

  static std::uint64_t key_of(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
           static_cast<std::uint32_t>(right);
  }

  // The slot of the key, or the free one where it would be.
  std::size_t index_of(std::uint64_t key) const {
    std::size_t index = (key * 0x9E3779B97F4A7C15U) >> 32 & (slots_.size() - 1);
    while (slots_[index].key != key && slots_[index].key != kFree)
      index = (index + 1) & (slots_.size() - 1);
    return index;
  }

  std::vector<Slot> slots_;
  std::size_t num_pairs_ = 0;
};

}  // namespace headroom
