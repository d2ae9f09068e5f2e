#include "train/window_loss.h"

#include <headroom/comm/communicator.h>
#include <headroom/memory/meter.h>

#include <torch/torch.h>

namespace headroom {

void ComparedLoss::prepare(const Window& window, const Walk& walk) {
  const Share share = share_of(window.num_samples(), ranks_.rank(), ranks_.size());
  executor_.begin(window.num_samples(), share.begin);
  walk([&](const MicroBatch& micro) { executor_.embed(micro); });
  if (share.begin == share.end) {
    const OwnerScope owner(Owner::kInputs);
    executor_.make_room(data_.load({window.samples.front()}));
  }
  // Afterwards no rank may fail before the exchange.
  const OwnerScope owner(Owner::kOther);
  scratch_ =
      torch::empty({exchange_scratch_bytes(executor_.embeddings(), ranks_.size())}, torch::kByte);
}

double ComparedLoss::begin(double scale) {
  ranks_.sum(executor_.embeddings(), scratch_);  // all rows in their places, bit for bit
  scratch_.reset();
  const double loss_sum = executor_.run_loss(scale, ranks_.is_first());
  return ranks_.is_first() ? loss_sum : 0.0;
}

void ComparedLoss::end() {
  executor_.clear();
  scratch_.reset();
}

}  // namespace headroom
