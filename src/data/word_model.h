#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace headroom {

/// Pieces of text and their numbers.
using Vocabulary = std::unordered_map<std::string, std::int32_t>;

/// One word into tokens.
class WordModel {
 public:
  virtual ~WordModel() = default;
  /// Appends the tokens of a word, any bytes. The time is n log n at most.
  virtual void encode(std::string_view word, std::vector<std::int32_t>& tokens) const = 0;
};

/// What makes a byte-pair encoding.
struct BytePairs {
  Vocabulary vocabulary;                                    ///< pieces as they are written in files
  std::vector<std::pair<std::string, std::string>> merges;  ///< the first is made first
  bool is_byte_level = true;  ///< pieces are bytes, written in GPT-2's alphabet; otherwise letters
  bool ignores_merges = false;  ///< a word that is in the vocabulary is one token
  std::optional<std::string>
      unknown;                       ///< for a letter that is not there; without it, it is dropped
  bool fuses_unknown = false;        ///< unknown letters in a row are one token
  bool falls_back_to_bytes = false;  ///< a letter that is not there becomes tokens <0x41>
};
/// Throws DataError when a merge makes or uses a piece that is not in the vocabulary.
std::unique_ptr<WordModel> make_byte_pairs(const BytePairs& parts);

/// What makes a WordPiece vocabulary.
struct WordPieces {
  Vocabulary vocabulary;
  std::string unknown = "[UNK]";
  std::string continuation = "##";     ///< before a piece that does not start a word
  std::int64_t most_characters = 100;  ///< a longer word is unknown
};
/// Throws DataError when `unknown` is not in the vocabulary.
std::unique_ptr<WordModel> make_word_pieces(WordPieces parts);

/// A piece written in GPT-2's alphabet, in which each byte is a printable character, as bytes;
/// nothing when a character is no letter of it.
std::optional<std::string> bytes_of_piece(std::string_view piece);
/// The letter of a byte.
std::string piece_of_byte(unsigned char byte);

}  // namespace headroom
