#pragma once

// Random samples that a model of the zoo can read.

#include <headroom/data/dataset.h>
#include <headroom/model/zoo.h>

#include <memory>
#include <optional>

namespace headroom::testing {

inline std::unique_ptr<Dataset> synthetic_data(const ModelInput& input, std::int64_t num_samples,
                                               std::uint64_t seed) {
  if (input.kind == ModelInput::Kind::kImages) {
    return make_synthetic_images(num_samples, input.channels, input.rows, input.columns,
                                 input.num_classes, seed);
  }
  if (input.kind == ModelInput::Kind::kPairs) {
    return make_synthetic_pairs(num_samples, input.channels, input.rows, input.columns,
                                input.length, input.vocabulary, seed);
  }
  std::optional<Masking> masking;
  if (input.num_masked > 0) masking = Masking{input.num_masked, input.mask_token, seed};
  return make_synthetic_tokens(num_samples, input.length, input.vocabulary, seed, masking);
}

}  // namespace headroom::testing
