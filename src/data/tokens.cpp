#include <headroom/core/error.h>
#include <headroom/data/tokens.h>

#include "core/counter_random.h"
#include "core/input_file.h"
#include "data/text_data.h"
#include "data/token_rows.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

namespace headroom {
namespace {

std::unique_ptr<InputFile> open_data_file(const std::string& path) {
  auto file = std::make_unique<InputFile>(path);
  if (file->size() == 0) file->fail("the file is empty");
  return file;
}

// Little-endian numbers of `width` bytes from `offset` on.
class FileTokens final : public TokenSource {
 public:
  FileTokens(std::unique_ptr<InputFile> file, std::int64_t offset, std::int64_t width,
             std::int64_t count)
      : file_(std::move(file)), offset_(offset), width_(width), count_(count) {}

  std::int64_t size() const override { return count_; }
  std::string name() const override { return file_->path(); }
  void read(std::int64_t begin, std::int64_t count, std::int64_t* out) const override {
    std::vector<unsigned char> from(static_cast<std::size_t>(count * width_));
    file_->read_at(offset_ + begin * width_, from.data(), count * width_);
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t token = 0;
      for (std::int64_t byte = width_ - 1; byte >= 0; --byte)
        token = token << 8 | from[static_cast<std::size_t>(i * width_ + byte)];
      out[i] = token;
    }
  }

 private:
  std::unique_ptr<InputFile> file_;
  std::int64_t offset_, width_, count_;
};

class EncodedTokens final : public TokenSource {
 public:
  EncodedTokens(std::string name, std::vector<std::int32_t> tokens)
      : name_(std::move(name)), tokens_(std::move(tokens)) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()); }
  std::string name() const override { return name_; }
  void read(std::int64_t begin, std::int64_t count, std::int64_t* out) const override {
    for (std::int64_t i = 0; i < count; ++i) out[i] = tokens_[static_cast<std::size_t>(begin + i)];
  }

 private:
  std::string name_;
  std::vector<std::int32_t> tokens_;
};

class PartOfTokens final : public TokenSource {
 public:
  PartOfTokens(Tokens whole, std::int64_t begin, std::int64_t count)
      : whole_(std::move(whole)), begin_(begin), count_(count) {}

  std::int64_t size() const override { return count_; }
  std::string name() const override {
    return fmt::format("{} from token {}", whole_->name(), begin_);
  }
  void read(std::int64_t begin, std::int64_t count, std::int64_t* out) const override {
    whole_->read(begin_ + begin, count, out);
  }

 private:
  Tokens whole_;
  std::int64_t begin_, count_;
};

class Crops final : public TokenRows {
 public:
  Crops(Tokens tokens, std::int64_t length, std::int64_t vocabulary, std::int64_t num_samples,
        bool in_order, std::uint64_t seed)
      : tokens_(std::move(tokens)),
        length_(length),
        vocabulary_(vocabulary),
        num_samples_(num_samples),
        in_order_(in_order),
        seed_(seed) {}

  std::int64_t size() const override { return num_samples_; }
  bool resamples_each_epoch() const override { return !in_order_; }

  void read(std::int64_t index, std::int64_t count, std::int64_t* out) const override {
    const std::int64_t start = start_of(index);
    tokens_->read(start, count, out);
    for (std::int64_t i = 0; i < count; ++i) {
      if (out[i] < vocabulary_) continue;
      throw DataError(
          fmt::format("{}: token {} at position {} is not below the model's vocabulary of {}; set "
                      "vocab_size in --model_config",
                      tokens_->name(), out[i], start + i, vocabulary_));
    }
  }

 private:
  std::int64_t start_of(std::int64_t index) const {
    if (in_order_) return index * length_;
    const auto num_starts = static_cast<std::uint64_t>(tokens_->size() - length_);
    return static_cast<std::int64_t>(mix(mix(seed_) ^ static_cast<std::uint64_t>(index)) %
                                     num_starts);
  }

  Tokens tokens_;
  std::int64_t length_, vocabulary_, num_samples_;
  bool in_order_;
  std::uint64_t seed_;
};

void check_length(const Tokens& tokens, std::int64_t length) {
  if (length < 1) throw ConfigError(fmt::format("samples of {} tokens: give at least 1", length));
  if (tokens->size() < length + 1) {
    throw DataError(
        fmt::format("{}: {} tokens, but one sample needs {} ({} and one more); give more text or "
                    "shorter samples in --model_config",
                    tokens->name(), tokens->size(), length + 1, length));
  }
}

std::int32_t header_word(const InputFile& file, std::int64_t index) {
  std::int32_t word = 0;
  file.read_at(index * 4, &word, sizeof(word));
  return word;
}

}  // namespace

Tokens open_token_file(const std::string& path) {
  constexpr std::int64_t kHeaderBytes = 1024;
  constexpr std::int32_t kMagic16 = 20240520, kMagic32 = 20240801;
  auto file = open_data_file(path);
  const std::int32_t magic = file->size() >= kHeaderBytes ? header_word(*file, 0) : 0;
  if (magic == kMagic16 || magic == kMagic32) {
    const std::int64_t width = magic == kMagic16 ? 2 : 4, count = header_word(*file, 2);
    if (count < 1 || kHeaderBytes + count * width != file->size()) {
      throw DataError(
          fmt::format("{}: the header announces {} tokens ({} bytes with the header), but the file "
                      "has {} bytes",
                      path, count, kHeaderBytes + count * width, file->size()));
    }
    return std::make_shared<FileTokens>(std::move(file), kHeaderBytes, width, count);
  }
  if (file->size() % 2 != 0)
    throw DataError(fmt::format("{}: {} bytes are not whole tokens of 2 bytes: is it truncated?",
                                path, file->size()));
  const std::int64_t count = file->size() / 2;
  return std::make_shared<FileTokens>(std::move(file), 0, 2, count);
}

Tokens open_text_file(const std::string& path) {
  auto file = open_data_file(path);
  const std::int64_t count = file->size();
  return std::make_shared<FileTokens>(std::move(file), 0, 1, count);
}

Tokens open_text_file(const std::string& path, const Tokenizer& tokenizer) {
  const std::unique_ptr<InputFile> file = open_data_file(path);
  const std::vector<std::int64_t> tokens = tokenizer.encode(file->read_all(file->size()));
  return make_token_list(path, {tokens.begin(), tokens.end()});
}

Tokens make_token_list(std::string name, std::vector<std::int32_t> tokens) {
  return std::make_shared<EncodedTokens>(std::move(name), std::move(tokens));
}

Tokens part_of(Tokens tokens, std::int64_t begin, std::int64_t end) {
  if (begin < 0 || end < begin || end > tokens->size()) {
    throw DataError(fmt::format("{}: tokens {} to {} of {} are not there", tokens->name(), begin,
                                end, tokens->size()));
  }
  return std::make_shared<PartOfTokens>(std::move(tokens), begin, end - begin);
}

std::unique_ptr<Dataset> make_random_crops(Tokens tokens, std::int64_t length,
                                           std::int64_t vocabulary, std::int64_t num_samples,
                                           std::uint64_t seed,
                                           const std::optional<Masking>& masking) {
  check_length(tokens, length);
  return make_token_dataset(
      std::make_unique<Crops>(std::move(tokens), length, vocabulary, num_samples, false, seed),
      length, vocabulary, masking);
}

std::unique_ptr<Dataset> make_crops_in_order(Tokens tokens, std::int64_t length,
                                             std::int64_t vocabulary,
                                             const std::optional<Masking>& masking) {
  check_length(tokens, length);
  const std::int64_t num_samples = (tokens->size() - 1) / length;
  return make_token_dataset(
      std::make_unique<Crops>(std::move(tokens), length, vocabulary, num_samples, true, 0), length,
      vocabulary, masking);
}

}  // namespace headroom
