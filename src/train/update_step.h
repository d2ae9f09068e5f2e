#pragma once

// One update: forward, recompute, backward, sum over ranks, unscale, clip, step.

#include <headroom/data/dataset.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/chain.h>
#include <headroom/optim/grad_scaler.h>
#include <headroom/optim/optimizer.h>
#include <headroom/optim/schedule.h>
#include "data/loader.h"
#include "execute/optimizer_in_backward.h"

#include "train/paged_update.h"
#include "train/rank_group.h"
#include "train/run_settings.h"
#include "train/step_undo.h"
#include "train/update.h"
#include "train/window_loss.h"
#include "train/window_plans.h"
#include "train/windows.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace headroom {

/// For whoever watches the operations of a step.
struct StepHooks {
  /// After each operation; `has_planned_size` says that the micro-batch is as large as the plan's.
  std::function<void(std::size_t operation, bool has_planned_size)> on_operation;
  /// The step is made again from its start.
  std::function<void()> on_undo;
};

class UpdateStep {
 public:
  /// Everything given must outlive the step. Throws ConfigError when spill_dir cannot be written.
  UpdateStep(const RunSettings& settings, const Chain& chain, const Dataset& data,
             WindowPlans& plans, const RankGroup& ranks, StepHooks hooks = {},
             StaticPager* pager = nullptr);
  ~UpdateStep();

  /// Brings weights and the optimizer's state to where the plan wants them, and allocates the state
  /// as far as a snapshot has not brought it.
  void prepare();
  /// Continues after so many updates that were applied.
  void resume(std::int64_t num_applied, const GradScalerState& scaler);

  /// One update from the samples of a window. Collective. When memory runs out on any rank, or
  /// shapes need another plan, every rank undoes the step, takes another plan and makes the same
  /// step again. Throws
  ///   - Stopped on every rank when any was asked to stop,
  ///   - what loading or a stage threw on the rank where it happened, and CommError on the others,
  ///   - BudgetError when no plan fits,
  ///   - Error when something is not finite and --error_on_nan was given;
  /// then everything is as it was before the window, unless is_intact() says otherwise.
  Update run(const Window& window);

  /// A paged plan may put the end of an update off until the next one: brings it to its end, for
  /// whoever looks at weights or state now.
  void finish();

  /// False after a failure in the middle of an update, which cannot be undone.
  bool is_intact() const { return is_intact_ && !pages_.is_midway(); }

  LeanOptimizer& optimizer() { return *optimizer_; }
  GradScalerState scaler_state() const { return scaler_.state(); }
  const MicroResult& work() const { return work_; }  ///< summed over the run, on this rank
  double data_wait_seconds() const { return data_wait_seconds_; }  ///< the same
  const MemoryUse& peaks() const { return peaks_; }  ///< of the updates; what else runs is left out

 private:
  MicroBatch next_micro_batch();
  // The gradients of this rank's share of the window, and how that went.
  ShareReport compute_gradients(const Window& window);
  // Says in the report how the work went, instead of throwing.
  template <typename Work>
  void attempt(ShareReport& report, const Work& work);
  // Where a batch is in one piece, a loss that compares its samples is like any other.
  WindowLoss& loss_of_window();
  // Loads the share's micro-batches one by one and calls work(micro, whether it is the last), until
  // one needs another plan.
  template <typename Work>
  void walk(const std::vector<std::int64_t>& share, ShareReport& report, const Work& work);
  void accumulate(const std::vector<std::int64_t>& share, WindowLoss& loss, ShareReport& report);
  std::vector<std::int64_t> micro_batch_sizes(std::size_t num_samples) const;
  void request_micro_batches(const std::vector<std::int64_t>& samples);
  // Whatever summing needs is allocated before the ranks agree, because afterwards none may fail.
  void make_ready_to_sum(ShareReport& report);
  // Arms the optimizer in backward. A parameter that several stages share is complete after the
  // backward of each of them.
  void update_inside_next_backward();
  // Throws unless another plan can help.
  void rethrow_failure(const ShareReport& agreed);
  void sum_over_ranks(const ShareReport& agreed);
  Update apply(const Window& window, const ShareReport& agreed);
  bool clip_and_step(Update& update, const Window& window);
  bool step_paged(Update& update, const Window& window);
  std::string describe_skip(const Update& update, const Window& window,
                            const NamedParameters& gradients) const;
  NamedParameters named_gradients() const;
  std::vector<at::Tensor> gradients() const;
  void clear_gradients();
  // Everything as it was before the step.
  void abandon(const StepUndo& undo);
  void keep_peaks();
  ExecutorOptions executor_options();

  const RunSettings& settings_;
  const Chain& chain_;
  const Dataset& data_;
  WindowPlans& plans_;
  const RankGroup& ranks_;
  StepHooks hooks_;

  NamedParameters parameters_;
  std::vector<at::Tensor> buffers_;
  std::unique_ptr<LeanOptimizer> optimizer_;
  LrScheduler scheduler_;
  GradScaler scaler_;
  PagedUpdate pages_;
  std::unique_ptr<OptimizerInBackward> in_backward_;  // once a plan updates there
  SummedLoss summed_loss_;
  std::unique_ptr<ComparedLoss> compared_loss_;  // where the chain can split what it compares
  MicroBatchLoader loader_;

  std::int64_t num_items_ = 1;     // of the window in progress, over all ranks
  bool has_planned_size_ = false;  // the micro-batch in progress
  at::Tensor scratch_;             // for summing the gradients of the window in progress
  std::exception_ptr failure_;     // of this rank in the window in progress
  bool is_intact_ = true;
  MicroResult work_;
  double data_wait_seconds_ = 0.0;
  MemoryUse peaks_;
};

}  // namespace headroom
