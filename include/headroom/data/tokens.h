#pragma once

#include <headroom/data/dataset.h>
#include <headroom/data/tokenizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// Many tokens in a row, outside of tensor memory. Reading is const and safe from several threads.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t size() const = 0;
  /// Copies tokens [begin, begin + count), which must be there.
  virtual void read(std::int64_t begin, std::int64_t count, std::int64_t* out) const = 0;
  /// For messages: where the tokens come from.
  virtual std::string name() const = 0;
};
using Tokens = std::shared_ptr<const TokenSource>;

/// A file of tokens, read where it lies: as nanoGPT writes it (uint16 without a header) or as llm.c
/// does (a header of 1024 bytes, then uint16 or uint32; the header is recognised by its magic
/// number). Throws DataError when the file is missing, empty or truncated.
Tokens open_token_file(const std::string& path);

/// A text file by bytes, read where it lies. Throws DataError when it is missing or empty.
Tokens open_text_file(const std::string& path);

/// A text file through a tokenizer, four bytes per token in memory.
Tokens open_text_file(const std::string& path, const Tokenizer& tokenizer);

/// Tokens [begin, end) of a source, say to keep the last tenth for evaluation.
Tokens part_of(Tokens tokens, std::int64_t begin, std::int64_t end);

/// `num_samples` crops of length + 1 tokens: inputs (B, length), and targets one place further on.
/// Where crop i starts depends on the seed and i alone; each epoch draws new ones, so that a model
/// does not learn the places of a few cuts. Throws DataError when the source is shorter than a
/// crop; loading throws it for a token that is not below `vocabulary`. With `masking`, samples of a
/// masked-language model.
std::unique_ptr<Dataset> make_random_crops(Tokens tokens, std::int64_t length,
                                           std::int64_t vocabulary, std::int64_t num_samples,
                                           std::uint64_t seed,
                                           const std::optional<Masking>& masking = {});

/// The source from its start, in crops side by side, for evaluation. What does not fill a crop at
/// the end is left out.
std::unique_ptr<Dataset> make_crops_in_order(Tokens tokens, std::int64_t length,
                                             std::int64_t vocabulary,
                                             const std::optional<Masking>& masking = {});

}  // namespace headroom
