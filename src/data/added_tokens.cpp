#include "data/added_tokens.h"

#include "data/unicode.h"

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

bool is_apart(std::string_view text, std::size_t begin, std::size_t end) {
  const bool before =
      begin == 0 || !is_word_character(code_point_at(text, start_of_last(text, begin)).value);
  const bool after = end == text.size() || !is_word_character(code_point_at(text, end).value);
  return before && after;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string& content = tokens_[i].content;
    if (content.empty()) continue;
    by_content_[content] = i;
    lengths_.push_back(content.size());
    starts_[static_cast<unsigned char>(content[0])] = true;
  }
  std::sort(lengths_.rbegin(), lengths_.rend());
  lengths_.erase(std::unique(lengths_.begin(), lengths_.end()), lengths_.end());
}

const AddedToken* AddedTokens::longest_at(std::string_view text, std::size_t position) const {
  for (const std::size_t length : lengths_) {
    if (length > text.size() - position) continue;
    const auto found = by_content_.find(text.substr(position, length));
    if (found != by_content_.end()) return &tokens_[found->second];
  }
  return nullptr;
}

AddedTokens::Match AddedTokens::find(std::string_view text, std::size_t begin) const {
  if (tokens_.empty()) return {};
  for (std::size_t i = begin; i < text.size(); ++i) {
    if (!starts_[static_cast<unsigned char>(text[i])]) continue;
    const AddedToken* token = longest_at(text, i);
    if (token == nullptr) continue;
    Match match{i, i + token->content.size(), token->id};
    if (token->is_single_word && !is_apart(text, match.begin, match.end)) {
      i = match.end - 1;
      continue;
    }
    while (token->takes_blanks_before && match.begin > begin) {
      const std::size_t start = start_of_last(text, match.begin);
      if (start < begin || !is_space(code_point_at(text, start).value)) break;
      match.begin = start;
    }
    while (token->takes_blanks_after && match.end < text.size()) {
      const CodePoint next = code_point_at(text, match.end);
      if (!is_space(next.value)) break;
      match.end += next.num_bytes;
    }
    return match;
  }
  return {};
}

}  // namespace headroom
