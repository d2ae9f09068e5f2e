#include <headroom/data/dataset.h>

#include "core/counter_random.h"
#include "data/token_rows.h"

#include <torch/types.h>

#include <cmath>

namespace headroom {
namespace {

// The sum of four uniform 16-bit parts, centred and scaled to variance 1: close enough to normal,
// and cheap.
float draw_normal(std::uint64_t bits) {
  const double sum = static_cast<double>(bits & 0xffff) +
                     static_cast<double>((bits >> 16) & 0xffff) +
                     static_cast<double>((bits >> 32) & 0xffff) + static_cast<double>(bits >> 48);
  return static_cast<float>((sum / 65536.0 - 2.0) * std::sqrt(3.0));
}

class SyntheticImages final : public Dataset {
 public:
  SyntheticImages(std::int64_t num_samples, std::vector<std::int64_t> shape,
                  std::int64_t num_classes, std::uint64_t seed)
      : num_samples_(num_samples),
        shape_(std::move(shape)),
        num_classes_(num_classes),
        seed_(seed) {}

  std::int64_t size() const override { return num_samples_; }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    const std::int64_t values = shape_[0] * shape_[1] * shape_[2];
    const at::Tensor images = at::empty({count, shape_[0], shape_[1], shape_[2]}, at::kFloat);
    const at::Tensor labels = at::empty({count}, at::kLong);
    auto* out = images.data_ptr<float>();
    auto* label_out = labels.data_ptr<std::int64_t>();
    for (const std::int64_t index : indices) {
      for (std::int64_t i = 0; i < values; ++i) *out++ = draw_normal(draw(seed_, index, i));
      *label_out++ = static_cast<std::int64_t>(draw(seed_, index, -1) %
                                               static_cast<std::uint64_t>(num_classes_));
    }
    return {{images}, {labels}, count, count};
  }

 private:
  std::int64_t num_samples_;
  std::vector<std::int64_t> shape_;
  std::int64_t num_classes_;
  std::uint64_t seed_;
};

class SyntheticRows final : public TokenRows {
 public:
  SyntheticRows(std::int64_t num_samples, std::int64_t vocabulary, std::uint64_t seed)
      : num_samples_(num_samples), vocabulary_(vocabulary), seed_(seed) {}

  std::int64_t size() const override { return num_samples_; }
  void read(std::int64_t index, std::int64_t count, std::int64_t* out) const override {
    for (std::int64_t i = 0; i < count; ++i)
      out[i] = static_cast<std::int64_t>(draw(seed_, index, i) %
                                         static_cast<std::uint64_t>(vocabulary_));
  }

 private:
  std::int64_t num_samples_;
  std::int64_t vocabulary_;
  std::uint64_t seed_;
};

class SyntheticPairs final : public Dataset {
 public:
  SyntheticPairs(std::unique_ptr<const Dataset> images, std::unique_ptr<const TokenRows> tokens,
                 std::int64_t length, std::int64_t vocabulary, std::uint64_t seed)
      : images_(std::move(images)),
        tokens_(std::move(tokens)),
        length_(length),
        vocabulary_(vocabulary),
        seed_(seed) {}

  std::int64_t size() const override { return images_->size(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    MicroBatch batch = images_->load(indices);
    const at::Tensor tokens = at::empty({batch.num_samples, length_}, at::kLong);
    const at::Tensor ends = batch.targets.at(0).view({batch.num_samples, 1});  // what was a label
    for (std::size_t i = 0; i < indices.size(); ++i) {
      std::int64_t* row = tokens.data_ptr<std::int64_t>() + static_cast<std::int64_t>(i) * length_;
      tokens_->read(indices[i], length_, row);
      const auto end = static_cast<std::int64_t>(draw(seed_, indices[i], -2) %
                                                 static_cast<std::uint64_t>(length_));
      row[end] = vocabulary_ - 1;
      ends.data_ptr<std::int64_t>()[i] = end;
    }
    batch.inputs.insert(batch.inputs.end(), {tokens, ends});
    batch.targets.clear();
    return batch;
  }

 private:
  std::unique_ptr<const Dataset> images_;
  std::unique_ptr<const TokenRows> tokens_;
  std::int64_t length_, vocabulary_;
  std::uint64_t seed_;
};

}  // namespace

std::unique_ptr<Dataset> make_synthetic_images(std::int64_t num_samples, std::int64_t channels,
                                               std::int64_t rows, std::int64_t columns,
                                               std::int64_t num_classes, std::uint64_t seed) {
  return std::make_unique<SyntheticImages>(
      num_samples, std::vector<std::int64_t>{channels, rows, columns}, num_classes, seed);
}

std::unique_ptr<Dataset> make_synthetic_tokens(std::int64_t num_samples, std::int64_t length,
                                               std::int64_t vocabulary, std::uint64_t seed,
                                               const std::optional<Masking>& masking) {
  return make_token_dataset(std::make_unique<SyntheticRows>(num_samples, vocabulary, seed), length,
                            vocabulary, masking);
}

std::unique_ptr<Dataset> make_synthetic_pairs(std::int64_t num_samples, std::int64_t channels,
                                              std::int64_t rows, std::int64_t columns,
                                              std::int64_t length, std::int64_t vocabulary,
                                              std::uint64_t seed) {
  return std::make_unique<SyntheticPairs>(
      make_synthetic_images(num_samples, channels, rows, columns, 1, seed),
      std::make_unique<SyntheticRows>(num_samples, vocabulary, mix(seed)), length, vocabulary,
      seed);
}

}  // namespace headroom
