#pragma once

// The part of an update that knows of pages: what comes before an operation, what becomes of
// gradients that are complete, and the update of one unit after another.

#include <headroom/optim/grad_scaler.h>
#include <headroom/optim/optimizer.h>
#include <headroom/train/run_plan.h>
#include "execute/static_pager.h"

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace headroom {

class PagedUpdate {
 public:
  /// With a null pager nothing is ever paged. Everything given must outlive this.
  PagedUpdate(StaticPager* pager, LeanOptimizer& optimizer, GradScaler& scaler,
              const NamedParameters& parameters);
  ~PagedUpdate();

  /// Brings weights and state to where the plan wants them, and allocates the state that stays in
  /// memory; finishes an update that waits. Throws BudgetError when the disk is full.
  void adopt(const PagingPlan& plan);
  /// Whether the plan in force pages anything: what follows is for then alone.
  bool is_active() const { return pager_ != nullptr && pager_->is_active(); }

  /// A window of these micro-batches begins.
  void start(const RunPlan& plan, const std::vector<std::int64_t>& micro_batch_sizes);
  /// Brings what the operation needs; carries out updates that were put off until now.
  void before_operation(std::size_t operation);
  /// Gradients that this operation completed are unscaled, and their squares summed; where the plan
  /// says so, their parameters are updated. Throws Error when gradients are not finite after others
  /// were used.
  void after_operation(std::size_t operation);

  /// Of the whole window, in bits what the gradients together would have.
  double grad_norm() const;
  /// For each parameter something that is finite where its gradient is.
  NamedParameters finite_like_gradients() const;
  /// Whether every parameter was updated in backward.
  bool has_updated() const { return has_updated_; }
  /// Multiplies the gradients with `factor`, updates every parameter and drops the gradients, or
  /// puts that off until the next window or finish(), as the plan says. After an error weights and
  /// state on disk are in an undefined state.
  void step(double factor);
  /// Carries out an update that was put off, if there is one.
  void finish();
  bool is_waiting() const { return waiting_.has_value(); }
  /// Whether some parameters are updated and others not, or not all of them written: an error then
  /// leaves nothing to continue from.
  bool is_midway() const { return is_midway_; }
  /// Ends the window without an update; gradients are the caller's to clear, unless an update
  /// waits. Never throws.
  void abandon() noexcept;

 private:
  // An update that was put off.
  struct Waiting {
    double factor = 1;
    std::vector<double> learning_rates;  // by group
  };

  void walk(std::vector<PageStep> steps);
  void advance();
  void run_updates();
  void complete(std::size_t step);
  void complete(const at::Tensor& parameter);
  bool is_finite(std::size_t unit) const;
  void update_unit(std::size_t unit);
  void update(at::Tensor& parameter, double factor, std::optional<std::size_t> unit = {});
  void end_walk();

  StaticPager* pager_;
  LeanOptimizer& optimizer_;
  GradScaler& scaler_;
  const NamedParameters& parameters_;
  std::map<const c10::TensorImpl*, std::size_t> index_of_;  // in parameters_
  std::map<const c10::TensorImpl*, std::size_t> group_of_;
  std::vector<at::Tensor> others_;  // that are in no unit
  std::vector<SquareSum> sums_;     // by parameter
  bool has_adopted_ = false;

  std::vector<std::vector<bool>> needs_step_;           // by micro-batch and operation
  std::vector<std::optional<std::size_t>> updated_at_;  // by step: the unit that it updates
  std::vector<std::vector<std::size_t>> completed_at_;  // by step: the units
  std::size_t next_ = 0;                                // step
  std::size_t micro_ = 0;
  double factor_ = 1;  // of gradients, at the updates of the walk
  std::optional<Waiting> waiting_;
  bool is_skipping_ = false;  // gradients are not finite: nothing is updated in this window
  bool has_updated_ = false;
  bool is_midway_ = false;
};

}  // namespace headroom
