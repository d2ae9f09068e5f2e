#pragma once

#include <headroom/model/chain.h>

#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// What training changes of a chain: parameters that require grad, and buffers, as views.
struct TrainedWeights {
  /// By the names and in the shapes of the saved model where nothing is frozen; by the chain's own
  /// names otherwise, and for a chain without a published form.
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  /// The text of config.json that makes a folder of them a model; empty: it is none by itself.
  std::string config;
};
TrainedWeights trained_weights(const Chain& chain);

}  // namespace headroom
