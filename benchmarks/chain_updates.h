#pragma once

// Updates of a chain on one batch, everything kept, as a benchmark times them.

#include <headroom/execute/executor.h>
#include <headroom/model/chain.h>
#include "optim/adam.h"

#include "timing.h"

#include <utility>
#include <vector>

namespace headroom::benchmark {

class ChainUpdates {
 public:
  ChainUpdates(Chain model, MicroBatch batch, ExecutorOptions options = {})
      : chain(std::move(model)),
        micro(std::move(batch)),
        executor_(chain, std::move(options)),
        optimizer_(chain.parameters(), AdamWOptions(1e-4)),
        operations_(keep_everything(chain.size())) {}

  /// Seconds of forward, backward and AdamW.
  double update() {
    const double begin = now();
    executor_.accumulate(micro, operations_, 1.0 / static_cast<double>(micro.num_items));
    optimizer_.step();
    for (const at::Tensor& p : chain.parameters()) p.mutable_grad() = at::Tensor();
    return now() - begin;
  }

  Chain chain;
  MicroBatch micro;

 private:
  Executor executor_;
  AdamW optimizer_;
  std::vector<Operation> operations_;
};

}  // namespace headroom::benchmark
