#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace headroom {

/// Some samples with what the model reads of them. A batch and the micro-batches cut from it have
/// the same form.
struct MicroBatch {
  std::vector<at::Tensor> inputs;   ///< what the first stage is given; dimension 0 is the sample
  std::vector<at::Tensor> targets;  ///< what the loss is given; dimension 0 is the sample
  std::int64_t num_samples = 0;
  std::int64_t num_items =
      0;  ///< what the loss is averaged over: samples, or tokens that are not padding
};

}  // namespace headroom
