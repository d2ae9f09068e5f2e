#pragma once

// How the loss of a window reaches its micro-batches.

#include <headroom/core/micro_batch.h>
#include <headroom/data/dataset.h>
#include <headroom/execute/executor.h>
#include <headroom/model/chain.h>
#include "execute/contrastive_executor.h"

#include "train/rank_group.h"
#include "train/windows.h"

#include <functional>
#include <vector>

namespace headroom {

/// Used once per attempt at a window: prepare(), is_prepared() and, where that is true, begin() and
/// accumulate() for each micro-batch of this rank's share; end() in any case.
class WindowLoss {
 public:
  /// Calls its argument with each micro-batch of this rank's share.
  using Walk = std::function<void(const std::function<void(const MicroBatch&)>&)>;

  virtual ~WindowLoss() = default;

  /// What must be known of all micro-batches before the first one runs backward.
  virtual void prepare(const Window& window, const Walk& walk) = 0;
  /// Whether begin() may follow, given whether this rank's prepare() went well. Collective.
  virtual bool is_prepared(bool here) = 0;
  /// What is known of the loss by now, summed over the items of this rank's share. `scale` is that
  /// of the gradient.
  virtual double begin(double scale) = 0;
  /// Adds the gradient of the micro-batch to the parameters' gradients; the walk's order.
  virtual MicroResult accumulate(const MicroBatch& micro,
                                 const std::vector<Operation>& operations) = 0;
  /// Frees what is left.
  virtual void end() = 0;
};

/// A loss that is a sum over samples: each micro-batch has its part of it.
class SummedLoss final : public WindowLoss {
 public:
  SummedLoss(const Chain& chain, const ExecutorOptions& options) : executor_(chain, options) {}

  void prepare(const Window& /*window*/, const Walk& /*walk*/) override {}
  bool is_prepared(bool here) override { return here; }
  double begin(double scale) override {
    scale_ = scale;
    return 0.0;
  }
  MicroResult accumulate(const MicroBatch& micro,
                         const std::vector<Operation>& operations) override {
    return executor_.accumulate(micro, operations, scale_);
  }
  void end() override {}

 private:
  Executor executor_;
  double scale_ = 1.0;
};

/// A loss that compares the samples of the whole window, over micro-batches and ranks.
class ComparedLoss final : public WindowLoss {
 public:
  /// Everything given must outlive it.
  ComparedLoss(const Chain& chain, const ExecutorOptions& options, const Dataset& data,
               const RankGroup& ranks)
      : executor_(chain, options), data_(data), ranks_(ranks) {}

  void prepare(const Window& window, const Walk& walk) override;
  bool is_prepared(bool here) override { return !ranks_.any(!here); }
  double begin(double scale) override;
  MicroResult accumulate(const MicroBatch& micro,
                         const std::vector<Operation>& operations) override {
    return executor_.accumulate(micro, operations);
  }
  void end() override;

 private:
  ContrastiveExecutor executor_;
  const Dataset& data_;
  const RankGroup& ranks_;
  at::Tensor scratch_;  // for what ranks exchange
};

}  // namespace headroom
