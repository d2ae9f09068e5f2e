#include "data/unicode.h"
#include "data/word_model.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

class WordPieceModel final : public WordModel {
 public:
  explicit WordPieceModel(WordPieces parts) : parts_(std::move(parts)) {
    const auto found = parts_.vocabulary.find(parts_.unknown);
    if (found == parts_.vocabulary.end()) {
      throw DataError(
          fmt::format("the unknown token '{}' is not in the vocabulary", parts_.unknown));
    }
    unknown_ = found->second;
    for (const auto& [piece, id] : parts_.vocabulary) longest_ = std::max(longest_, piece.size());
  }

  // The longest piece that the word starts with, then the longest that the rest starts with, and so
  // on; a word with a rest that starts with no piece is unknown as a whole.
  void encode(std::string_view word, std::vector<std::int32_t>& tokens) const override {
    const std::size_t num_before = tokens.size();
    std::int64_t num_characters = 0;
    for (std::size_t i = 0; i < word.size(); i += code_point_at(word, i).num_bytes)
      ++num_characters;
    bool is_known = num_characters <= parts_.most_characters;
    for (std::size_t begin = 0; is_known && begin < word.size();) {
      const std::size_t end = end_of_piece(word, begin, tokens);
      is_known = end > begin;
      begin = end;
    }
    if (is_known) return;
    tokens.resize(num_before);
    tokens.push_back(unknown_);
  }

 private:
  std::size_t end_of_piece(std::string_view word, std::size_t begin,
                           std::vector<std::int32_t>& tokens) const {
    std::string piece = begin > 0 ? parts_.continuation : std::string();
    const std::size_t prefix = piece.size();
    if (prefix >= longest_) return begin;
    piece.append(word.substr(begin, longest_ - prefix));
    while (piece.size() > prefix) {
      const auto found = parts_.vocabulary.find(piece);
      if (found != parts_.vocabulary.end()) {
        tokens.push_back(found->second);
        return begin + piece.size() - prefix;
      }
      piece.resize(start_of_last(piece, piece.size()));
    }
    return begin;
  }

  WordPieces parts_;
  std::int32_t unknown_ = 0;
  std::size_t longest_ = 0;  // bytes of a piece
};

}  // namespace

std::unique_ptr<WordModel> make_word_pieces(WordPieces parts) {
  return std::make_unique<WordPieceModel>(std::move(parts));
}

}  // namespace headroom
