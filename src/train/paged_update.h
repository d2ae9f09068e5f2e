#pragma once

// The part of an update that knows of pages: what comes before an operation, what becomes of
// gradients that are complete, and the update of one unit after another.

#include <headroom/optim/grad_scaler.h>
#include <headroom/optim/optimizer.h>
#include <headroom/train/run_plan.h>
#include "execute/static_pager.h"

#include <cstdint>
#include <map>
#include <vector>

namespace headroom {

class PagedUpdate {
 public:
  /// With a null pager nothing is ever paged. Everything given must outlive this.
  PagedUpdate(StaticPager* pager, LeanOptimizer& optimizer, GradScaler& scaler,
              const NamedParameters& parameters);
  ~PagedUpdate();

  /// Brings weights and state to where the plan wants them, and allocates the state that stays in
  /// memory. Throws BudgetError when the disk is full.
  void adopt(const PagingPlan& plan);
  /// Whether the plan in force pages anything: what follows is for then alone.
  bool is_active() const { return pager_ != nullptr && pager_->is_active(); }

  /// A window of these micro-batches begins.
  void start(const RunPlan& plan, const std::vector<std::int64_t>& micro_batch_sizes);
  void before_operation(std::size_t operation);
  /// Gradients that this operation completed are unscaled, and their squares summed.
  void after_operation(std::size_t operation);

  /// Of the whole window, in bits what the gradients together would have.
  double grad_norm() const;
  /// For each parameter something that is finite where its gradient is.
  NamedParameters finite_like_gradients() const;
  /// Multiplies the gradients with `factor`, updates every parameter and drops the gradients. After
  /// an error weights and state on disk are in an undefined state.
  void step(double factor);
  /// Ends the window without an update; gradients are the caller's to clear. Never throws.
  void abandon() noexcept;

 private:
  void complete(const at::Tensor& parameter);
  void update(at::Tensor& parameter, double factor);

  StaticPager* pager_;
  LeanOptimizer& optimizer_;
  GradScaler& scaler_;
  const NamedParameters& parameters_;
  std::map<const c10::TensorImpl*, std::size_t> index_of_;  // in parameters_
  std::map<const c10::TensorImpl*, std::size_t> group_of_;
  std::vector<at::Tensor> others_;  // that are in no unit
  std::vector<SquareSum> sums_;     // by parameter
  bool has_adopted_ = false;

  std::vector<std::vector<std::ptrdiff_t>> step_of_;    // by micro-batch and operation; -1: none
  std::vector<std::vector<std::size_t>> completed_at_;  // by step: the units
  std::size_t micro_ = 0;
  std::size_t num_accumulating_ = 0;  // steps before those of the update
};

}  // namespace headroom
