#pragma once

#include "data/added_tokens.h"
#include "data/text_steps.h"
#include "data/word_model.h"

#include <headroom/data/tokenizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace headroom {

/// How pieces become text.
struct PieceJoin {
  bool puts_spaces_between = false;  ///< WordPiece: words, unless a piece goes on with one
  std::string continuation = "##";
  bool cleans_up = false;          ///< no space before a full stop, and the like
  bool drops_first_space = false;  ///< the one that the tokenizer put there
};

/// Places in a template for the tokens of the texts; other values are special tokens.
inline constexpr std::int64_t kFirstText = -1, kSecondText = -2;

/// What a tokenizer is made of, in the order in which text passes through it.
struct TokenizerParts {
  std::vector<AddedToken> added;
  std::vector<TextStep> normalizers;
  std::vector<SplitStep> splits;
  std::shared_ptr<const WordModel> model;
  std::vector<std::int64_t> one_text{kFirstText};
  std::vector<std::int64_t> two_texts{kFirstText, kSecondText};
  std::vector<std::string> pieces;  ///< the text of each token
  PieceJoin join;
  SpecialTokens special;
  std::vector<std::pair<std::string, std::string>> files;  ///< what it was made from: path, name
};
std::unique_ptr<Tokenizer> compose_tokenizer(TokenizerParts parts);

/// Copies a file into a folder, whole or not at all, under a name there. Throws DataError.
void copy_tokenizer_file(const std::string& path, const std::string& folder,
                         const std::string& name);
/// Writes a file, whole or not at all. Throws DataError.
void write_tokenizer_file(const std::string& folder, const std::string& name,
                          const std::string& content);
/// A file whole, as one string. Throws DataError when it cannot be read.
std::string read_tokenizer_file(const std::string& path);

/// The parts that a tokenizer.json describes. Throws DataError, naming what it does not know.
TokenizerParts read_tokenizer_json(const std::string& path);
/// The same from a text; `name` is for messages.
TokenizerParts parse_tokenizer_json(const std::string& text, const std::string& name);

/// vocab.json as a vocabulary.
Vocabulary read_vocabulary_json(const std::string& path);

/// Sets the text of each token: of the vocabulary, by `text_of`, and of the added tokens. Throws
/// DataError for numbers that are negative or leave absurd gaps.
void set_pieces(TokenizerParts& parts, const Vocabulary& vocabulary,
                const std::function<std::string(const std::string&)>& text_of);

/// What tokenizer_config.json says, as far as it matters here; defaults where it says nothing.
struct TokenizerConfig {
  std::string tokenizer_class;
  bool adds_space_before = false;
  bool lower_case = true;
  std::optional<bool> strip_accents;
  bool separates_ideographs = true;
  std::vector<AddedToken> added;
  std::unordered_map<std::string, std::string> names;  ///< "eos_token" -> "</s>"
};
/// The configuration of a folder, without a file the defaults. Throws DataError.
TokenizerConfig read_tokenizer_config(const std::string& folder);

/// The numbers of the tokens that the configuration names, or of the usual names.
SpecialTokens find_special_tokens(const TokenizerConfig& config, const TokenizerParts& parts);

}  // namespace headroom
