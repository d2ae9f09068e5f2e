#include "data/data_format.h"

namespace headroom {
namespace {

constexpr std::int64_t kNumSamples = 4096;

std::unique_ptr<Dataset> make(const ModelInput& input, std::uint64_t seed) {
  switch (input.kind) {
    case ModelInput::Kind::kTokens:
      return make_synthetic_tokens(kNumSamples, input.length, input.vocabulary, seed,
                                   masking_of(input, input.mask_token, seed));
    case ModelInput::Kind::kPairs:
      return make_synthetic_pairs(kNumSamples, input.channels, input.rows, input.columns,
                                  input.length, input.vocabulary, seed);
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
          {Kind::kImages, Kind::kTokens, Kind::kPairs},
          false,
          [](const std::string& dataset) { return dataset == "synthetic"; },
          [](const DataRequest& request) {
            return OpenedData{make(request.input, request.seed), nullptr, nullptr};
          }};
}

}  // namespace headroom
