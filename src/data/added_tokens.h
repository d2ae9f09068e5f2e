#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace headroom {

/// A token that is looked for in the text before anything else.
struct AddedToken {
  std::string content;
  std::int64_t id = 0;
  bool is_single_word = false;       ///< only between characters that are no letters or digits
  bool takes_blanks_before = false;  ///< blanks on that side belong to it
  bool takes_blanks_after = false;
  bool is_normalized = false;  ///< looked for after the text was normalized
};

/// Finds added tokens in a text: the leftmost, and there the longest.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens = {});
  AddedTokens(AddedTokens&&) = default;
  AddedTokens& operator=(AddedTokens&&) = default;

  bool empty() const { return tokens_.empty(); }

  struct Match {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::int64_t id = 0;
  };
  /// The first match from `begin` on; end = 0 when there is none.
  Match find(std::string_view text, std::size_t begin) const;

 private:
  const AddedToken* longest_at(std::string_view text, std::size_t position) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string_view, std::size_t> by_content_;
  std::vector<std::size_t> lengths_;  // longest first
  std::array<bool, 256> starts_{};    // bytes that a token starts with
};

}  // namespace headroom
