#include "core/counter_random.h"
#include "data/data_format.h"
#include "data/text_samples.h"

#include <algorithm>

namespace headroom {
namespace {

constexpr std::int64_t kNumSamples = 4096;

// Texts of an eighth of the length and more.
std::unique_ptr<Dataset> make_texts(const ModelInput& input, std::uint64_t seed) {
  const auto below = [&](std::int64_t index, std::int64_t number, std::int64_t end) {
    return static_cast<std::int64_t>(draw(seed, index, number) % static_cast<std::uint64_t>(end));
  };
  TokenLists texts;
  std::vector<std::int64_t> classes, tokens;
  const std::int64_t least = std::max<std::int64_t>(1, input.length / 8);
  for (std::int64_t i = 0; i < kNumSamples; ++i) {
    tokens.resize(static_cast<std::size_t>(least + below(i, -1, input.length - least + 1)));
    for (std::size_t t = 0; t < tokens.size(); ++t)
      tokens[t] = below(i, static_cast<std::int64_t>(t), input.vocabulary);
    texts.add(tokens);
    classes.push_back(below(i, -2, input.num_classes));
  }
  return make_labelled_texts(std::move(texts), std::move(classes), 0, input.sees_all_tokens);
}

std::unique_ptr<Dataset> make(const ModelInput& input, std::uint64_t seed) {
  switch (input.kind) {
    case ModelInput::Kind::kTokens:
      return make_synthetic_tokens(kNumSamples, input.length, input.vocabulary, seed,
                                   masking_of(input, input.mask_token, seed));
    case ModelInput::Kind::kPairs:
      return make_synthetic_pairs(kNumSamples, input.channels, input.rows, input.columns,
                                  input.length, input.vocabulary, seed);
    case ModelInput::Kind::kTexts:
      return make_texts(input, seed);
    case ModelInput::Kind::kImages:
      break;
  }
  return make_synthetic_images(kNumSamples, input.channels, input.rows, input.columns,
                               input.num_classes, seed);
}

}  // namespace

DataFormat synthetic_format() {
  using Kind = ModelInput::Kind;
  return {"synthetic",
          "is made up",
          {Kind::kImages, Kind::kTokens, Kind::kPairs, Kind::kTexts},
          false,
          [](const std::string& dataset) { return dataset == "synthetic"; },
          [](const DataRequest& request) {
            OpenedData data;
            data.train = make(request.input, request.seed);
            return data;
          }};
}

}  // namespace headroom
