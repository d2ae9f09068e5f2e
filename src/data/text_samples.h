#pragma once

// Texts of different lengths as samples. A micro-batch is as long as its longest text; what is
// padding counts for nothing.

#include <headroom/data/dataset.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace headroom {

/// Lists of tokens, one after the other in memory.
class TokenLists {
 public:
  void add(const std::vector<std::int64_t>& tokens) { add(tokens.begin(), tokens.end()); }
  template <typename Iterator>
  void add(Iterator begin, Iterator end) {
    for (; begin != end; ++begin) tokens_.push_back(static_cast<std::int32_t>(*begin));
    ends_.push_back(tokens_.size());
  }

  std::int64_t size() const { return static_cast<std::int64_t>(ends_.size()); }
  std::int64_t length(std::int64_t index) const {
    return static_cast<std::int64_t>(end_of(index) - end_of(index - 1));
  }
  const std::int32_t* tokens(std::int64_t index) const {
    return tokens_.data() + end_of(index - 1);
  }

 private:
  std::size_t end_of(std::int64_t index) const {
    return index < 0 ? 0 : ends_[static_cast<std::size_t>(index)];
  }

  std::vector<std::int32_t> tokens_;
  std::vector<std::size_t> ends_;
};

/// Texts with classes. Inputs are tokens (B, T); with `sees_all_tokens` also (B, T) bool, true for
/// tokens and false for padding. Targets are classes (B) and places (B, 1): of the token by which a
/// text is judged, which is its first with `sees_all_tokens`, and otherwise its last. No text may
/// be empty.
std::unique_ptr<Dataset> make_labelled_texts(TokenLists texts, std::vector<std::int64_t> classes,
                                             std::int64_t padding_token, bool sees_all_tokens);

/// Texts of two tokens or more, of which each token's next one is to be guessed: inputs (B, T) and,
/// one place further on, targets (B, T), which are -100 where there is none. Items are the tokens
/// to be guessed.
std::unique_ptr<Dataset> make_documents(TokenLists texts, std::int64_t padding_token);

/// The same texts, several in one row of at most `length` inputs, so that there is hardly any
/// padding. Beside the tokens, inputs are (B, T) int32, for each token the place in its row where
/// its text starts, before which it sees nothing, and (B, T) int64, its place in its text. Texts
/// have at most length + 1 tokens.
std::unique_ptr<Dataset> make_packed_documents(TokenLists texts, std::int64_t length,
                                               std::int64_t padding_token);

}  // namespace headroom
