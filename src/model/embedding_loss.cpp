#include <headroom/model/chain.h>

namespace headroom {

bool compares_embeddings(const Chain& chain) {
  for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
    if (chain.stage(i).couples_samples()) return false;
  }
  if (chain.size() < 2) return false;
  const Stage& last = chain.stage(chain.size() - 1);
  return last.couples_samples() && dynamic_cast<const EmbeddingLoss*>(&last) != nullptr;
}

}  // namespace headroom
