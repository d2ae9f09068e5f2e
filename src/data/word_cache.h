#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// The tokens of words that were seen lately. A word has one place, which another one with the same
/// place takes over, so that the cache never grows beyond its slots.
class WordCache {
 public:
  /// The tokens of a word, by `encode(tokens)` when they are not there. Valid until the next call.
  template <class Encode>
  const std::vector<std::int32_t>& find(std::string_view word, const Encode& encode) {
    if (slots_.empty()) slots_.resize(kNumSlots);
    const bool is_kept = word.size() <= kLongestWord;
    Slot& slot = is_kept ? slots_[std::hash<std::string_view>()(word) % kNumSlots] : long_;
    if (is_kept && slot.word == word && !word.empty()) return slot.tokens;
    slot.word.clear();  // for the case that encode throws
    slot.tokens.clear();
    encode(slot.tokens);
    if (is_kept) slot.word.assign(word);
    return slot.tokens;
  }

 private:
  static constexpr std::size_t kNumSlots = 1 << 16, kLongestWord = 64;
  struct Slot {
    std::string word;
    std::vector<std::int32_t> tokens;
  };
  std::vector<Slot> slots_;  // made at the first word
  Slot long_;
};

}  // namespace headroom
