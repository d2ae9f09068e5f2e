#include "model/trained_weights.h"

#include "model/published.h"

namespace headroom {

TrainedWeights trained_weights(const Chain& chain) {
  TrainedWeights weights;
  weights.tensors = chain.named_parameters();
  for (auto& buffer : chain.named_buffers()) weights.tensors.push_back(std::move(buffer));
  const auto* format = dynamic_cast<const PublishedFormat*>(chain.format().get());
  // A part of a model has no form of its own: rows of theirs are of whole matrices.
  if (format == nullptr || weights.tensors.size() != chain.named_tensors().size()) return weights;
  return {published_tensors(format->form(), chain), format->form().config};
}

}  // namespace headroom
