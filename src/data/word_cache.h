#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace headroom {

/// The tokens of words that were seen lately. A word has one place, which another one with the same
/// place takes over. It starts small, because many texts are short, and grows with the words that
/// come up to kMostSlots places.
class WordCache {
 public:
  /// The tokens of a word, by `encode(tokens)` when they are not there. Valid until the next call.
  template <class Encode>
  const std::vector<std::int32_t>& find(std::string_view word, const Encode& encode) {
    if (2 * num_taken_ >= slots_.size() && slots_.size() < kMostSlots) grow();
    const bool is_kept = word.size() <= kLongestWord;
    Slot& slot = is_kept ? slots_[place_of(word)] : long_;
    if (is_kept && slot.word == word && !word.empty()) return slot.tokens;
    if (is_kept && slot.word.empty()) ++num_taken_;
    slot.word.clear();  // for the case that encode throws
    slot.tokens.clear();
    encode(slot.tokens);
    if (is_kept) slot.word.assign(word);
    return slot.tokens;
  }

 private:
  static constexpr std::size_t kFewestSlots = 1 << 8, kMostSlots = 1 << 16, kLongestWord = 64;
  struct Slot {
    std::string word;
    std::vector<std::int32_t> tokens;
  };

  std::size_t place_of(std::string_view word) const {
    return std::hash<std::string_view>()(word) & (slots_.size() - 1);  // a power of two
  }
  void grow() {
    std::vector<Slot> before(std::max(kFewestSlots, 4 * slots_.size()));
    before.swap(slots_);
    num_taken_ = 0;
    for (Slot& slot : before) {
      if (slot.word.empty()) continue;
      slots_[place_of(slot.word)] = std::move(slot);  // places differ as they did before
      ++num_taken_;
    }
  }

  std::vector<Slot> slots_;    // made at the first word
  std::size_t num_taken_ = 0;  // about: a word whose encoding failed counts as well
  Slot long_;
};

}  // namespace headroom
