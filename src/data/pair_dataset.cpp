#include "data/pair_dataset.h"

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "data/image_reader.h"
#include "data/subset.h"
#include "data/text_data.h"
#include "data/text_samples.h"
#include "data/unicode.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace headroom {
namespace {

class Pairs final : public Dataset {
 public:
  Pairs(std::vector<std::string> images, TokenLists texts, const ImageTransform& transform,
        std::int64_t num_workers)
      : texts_(std::move(texts)), images_(std::move(images), transform, num_workers) {}

  std::int64_t size() const override { return images_.size(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    std::int64_t length = 1;
    for (const std::int64_t index : indices) length = std::max(length, texts_.length(index));
    const at::Tensor tokens = at::empty({count, length}, at::kLong),
                     ends = at::empty({count, 1}, at::kLong);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t index = indices[static_cast<std::size_t>(i)], own = texts_.length(index);
      auto* row = tokens.data_ptr<std::int64_t>() + i * length;
      std::copy_n(texts_.tokens(index), own, row);
      std::fill(row + own, row + length, row[own - 1]);  // which no token before it sees
      ends.data_ptr<std::int64_t>()[i] = own - 1;
    }
    return {{images_.load(indices), tokens, ends}, {}, count, count};
  }
  void expect(c10::ArrayRef<std::int64_t> indices) const override { images_.expect(indices); }

 private:
  TokenLists texts_;
  ImageReader images_;
};

TokenLists encode(const ImageTexts& pairs, const Tokenizer& tokenizer, const ModelInput& input) {
  const SpecialTokens special = tokenizer.special_tokens();
  const std::int64_t end = special.end.value_or(input.vocabulary - 1);
  TokenLists lists;
  for (std::size_t i = 0; i < pairs.texts.size(); ++i) {
    if (first_byte_outside_utf8(pairs.texts[i]))
      throw DataError(fmt::format("{}: the text is not UTF-8", shown_path(pairs.places[i])));
    std::vector<std::int64_t> tokens;
    if (special.begin) tokens.push_back(*special.begin);
    const std::vector<std::int64_t> words = tokenizer.encode(pairs.texts[i]);
    tokens.insert(tokens.end(), words.begin(), words.end());
    tokens.resize(static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(tokens.size()), input.length - 1)));
    tokens.push_back(end);
    lists.add(tokens);
  }
  return lists;
}

}  // namespace

OpenedData open_pairs(const DataRequest& request, ImageTexts train, ImageTexts eval) {
  const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_of(request);
  mask_token_beside(*tokenizer, request);  // checks the vocabulary
  const ImageTransform transform = image_transform_of(request.model_folder, request.input);
  const auto make = [&](ImageTexts pairs) {
    TokenLists texts = encode(pairs, *tokenizer, request.input);
    return std::make_shared<Pairs>(std::move(pairs.images), std::move(texts), transform,
                                   request.num_workers);
  };
  OpenedData data;
  data.tokenizer = tokenizer;
  data.files = {{"preprocessor_config.json", to_preprocessor_config(transform)}};
  if (eval.images.empty()) {
    std::tie(data.train, data.eval) = hold_out_a_tenth(make(std::move(train)), request.order_seed);
  } else {
    data.train = make(std::move(train));
    data.eval = make(std::move(eval));
  }
  return data;
}

}  // namespace headroom
