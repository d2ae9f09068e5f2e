#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// Tokens with a meaning of their own, where a tokenizer has them.
struct SpecialTokens {
  std::optional<std::int64_t> begin;    ///< of a text (bos_token)
  std::optional<std::int64_t> end;      ///< of a text (eos_token)
  std::optional<std::int64_t> unknown;  ///< for what is not in the vocabulary
  std::optional<std::int64_t> padding;
  std::optional<std::int64_t> mask;       ///< what a masked-language model is to guess
  std::optional<std::int64_t> separator;  ///< between two texts
  std::optional<std::int64_t> summary;    ///< the place that stands for the whole text (cls_token)
};

/// Text to tokens and back. Every method is const and safe from several threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// The tokens of a text, any bytes. A special token that is written out in the text becomes its
  /// number; none is added.
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;

  /// The text of tokens, special ones included. With byte-level tokens decode(encode(x)) = x for
  /// any bytes, unless the tokenizer normalizes text or puts a blank before it. A number that is no
  /// token is left out.
  virtual std::string decode(const std::vector<std::int64_t>& tokens) const = 0;

  /// The greatest number of a token, and one: what a model's vocabulary must have at least.
  virtual std::int64_t vocabulary() const = 0;

  /// None by default.
  virtual SpecialTokens special_tokens() const { return {}; }

  /// What a model is given for one text or a pair: the tokens with the special ones that belong
  /// around them (Llama's beginning, BERT's [CLS] and [SEP]). By default, the tokens alone.
  virtual std::vector<std::int64_t> with_special_tokens(
      const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& second = {}) const;

  /// Writes the files from which open_tokenizer(folder) makes the same tokenizer. Throws DataError
  /// when the files that this one was made from are gone, or the folder cannot be written.
  virtual void save(const std::string& folder) const = 0;
};

/// One token per byte, 256 in all. Saved as a tokenizer.json that Hugging Face's library reads too.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

/// The tokens of a SentencePiece model file, line by line (line ends are not tokens). Starts the
/// program headroom_sentencepiece, which lies beside the running one. Throws DataError when the
/// model cannot be read, and ConfigError when that program was not built.
std::unique_ptr<Tokenizer> open_sentencepiece(const std::string& model_path);

/// The tokenizer of a path:
/// - a folder with tokenizer.json, or vocab.json and merges.txt, or vocab.txt, or a SentencePiece
///   file named tokenizer.model, the first of these that is there;
/// - a file named *.json: a tokenizer.json of Hugging Face, with byte-level BPE or WordPiece;
/// - a file named *.txt: the vocabulary of BERT, one piece per line;
/// - any other file: a SentencePiece model.
/// tokenizer_config.json in the same folder names the special tokens; without it the usual names
/// count. Throws DataError, naming what is wrong, when the files cannot be read or hold a part that
/// is not known here (an unknown split pattern, say).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path);

/// Whether open_tokenizer(folder) would find files there.
bool has_tokenizer(const std::string& folder);

}  // namespace headroom
