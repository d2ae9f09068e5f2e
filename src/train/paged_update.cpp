#include "train/paged_update.h"

#include <headroom/memory/meter.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace headroom {

PagedUpdate::PagedUpdate(StaticPager* pager, LeanOptimizer& optimizer, GradScaler& scaler,
                         const NamedParameters& parameters)
    : pager_(pager), optimizer_(optimizer), scaler_(scaler), parameters_(parameters) {
  if (pager_ == nullptr) return;
  pager_->use_optimizer(&optimizer);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    index_of_[parameters[i].second.unsafeGetTensorImpl()] = i;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    for (const at::Tensor& parameter : optimizer.param_groups()[group].params())
      group_of_[parameter.unsafeGetTensorImpl()] = group;
  }
  std::set<const c10::TensorImpl*> in_units;
  for (std::size_t unit = 0; unit < pager_->units().size(); ++unit) {
    for (const at::Tensor& parameter : pager_->parameters(unit))
      in_units.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& [name, parameter] : parameters) {
    if (in_units.count(parameter.unsafeGetTensorImpl()) == 0) others_.push_back(parameter);
  }
}

// The optimizer's state ends with the run.
PagedUpdate::~PagedUpdate() {
  if (pager_ == nullptr) return;
  pager_->abandon();
  pager_->use_optimizer(nullptr);
}

void PagedUpdate::adopt(const PagingPlan& plan) {
  const OwnerScope owner(Owner::kOptimizer);
  const bool is_in_force = pager_ == nullptr || (plan.reads_ahead == pager_->plan().reads_ahead &&
                                                 plan.is_paged == pager_->plan().is_paged);
  if (has_adopted_ && is_in_force) return;
  if (pager_ != nullptr) pager_->adopt(plan);
  has_adopted_ = true;
  if (!plan.is_active()) return optimizer_.prepare_state();
  for (const at::Tensor& parameter : others_)
    optimizer_.prepare_state(parameter, group_of_.at(parameter.unsafeGetTensorImpl()));
  for (std::size_t unit = 0; unit < plan.units.size(); ++unit) {
    if (plan.pages(unit, PageKind::kState)) continue;
    for (const at::Tensor& parameter : pager_->parameters(unit)) {
      const auto group = group_of_.find(parameter.unsafeGetTensorImpl());
      if (group != group_of_.end()) optimizer_.prepare_state(parameter, group->second);
    }
  }
}

void PagedUpdate::start(const RunPlan& plan, const std::vector<std::int64_t>& micro_batch_sizes) {
  std::vector<PageStep> steps;
  step_of_.clear();
  for (const std::int64_t size : micro_batch_sizes) {
    Schedule schedule;
    schedule.operations = plan.batch.operations_for(size);
    std::vector<std::ptrdiff_t> step_of;
    auto next = static_cast<std::ptrdiff_t>(steps.size());
    for (const Operation& operation : schedule.operations)
      step_of.push_back(operation.kind == OperationKind::kFree ? -1 : next++);
    for (PageStep& step : micro_batch_steps(pager_->units(), schedule, !step_of_.empty()))
      steps.push_back(std::move(step));
    step_of_.push_back(std::move(step_of));
  }
  num_accumulating_ = steps.size();
  completed_at_.assign(num_accumulating_, {});
  std::vector<std::size_t> last(pager_->units().size(), num_accumulating_);
  for (std::size_t step = 0; step < num_accumulating_; ++step) {
    for (const PageUse& use : steps[step].uses) {
      if (use.page.kind == PageKind::kGradients) last[use.page.unit] = step;
    }
  }
  for (std::size_t unit = 0; unit < last.size(); ++unit) {
    if (last[unit] < num_accumulating_) completed_at_[last[unit]].push_back(unit);
  }
  for (PageStep& step : update_steps(pager_->units(), 0)) steps.push_back(std::move(step));
  pager_->start(std::move(steps));
  scaler_.forget_parts();
  sums_.assign(parameters_.size(), {});
  micro_ = 0;
}

void PagedUpdate::before_operation(std::size_t operation) {
  const std::ptrdiff_t step = step_of_[micro_][operation];
  if (step >= 0) pager_->before(static_cast<std::size_t>(step));
}

void PagedUpdate::after_operation(std::size_t operation) {
  const std::ptrdiff_t step = step_of_[micro_][operation];
  if (operation + 1 == step_of_[micro_].size()) ++micro_;
  if (step < 0) return;
  for (const std::size_t unit : completed_at_[static_cast<std::size_t>(step)]) {
    for (const at::Tensor& parameter : pager_->parameters(unit)) complete(parameter);
  }
  if (micro_ != step_of_.size()) return;
  for (const at::Tensor& parameter : others_) complete(parameter);
}

void PagedUpdate::complete(const at::Tensor& parameter) {
  const auto index = index_of_.find(parameter.unsafeGetTensorImpl());
  if (index == index_of_.end() || !parameter.grad().defined()) return;
  scaler_.unscale_part({parameter.grad()});
  sums_[index->second] = square_sum(parameter.grad());
}

double PagedUpdate::grad_norm() const { return norm_of(sums_); }

NamedParameters PagedUpdate::finite_like_gradients() const {
  NamedParameters named;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    named.emplace_back(parameters_[i].first, torch::full({1}, sums_[i].plain, torch::kDouble));
  return named;
}

void PagedUpdate::step(double factor) {
  for (std::size_t unit = 0; unit < pager_->units().size(); ++unit) {
    pager_->before(num_accumulating_ + unit);
    for (at::Tensor parameter : pager_->parameters(unit)) update(parameter, factor);
  }
  pager_->before(num_accumulating_ + pager_->units().size());
  for (at::Tensor& parameter : others_) update(parameter, factor);
}

void PagedUpdate::update(at::Tensor& parameter, double factor) {
  const auto group = group_of_.find(parameter.unsafeGetTensorImpl());
  if (group == group_of_.end() || !parameter.grad().defined()) return;
  if (factor < 1.0) parameter.grad().mul_(factor);
  optimizer_.step_parameter(parameter, group->second);
  parameter.mutable_grad() = at::Tensor();
}

void PagedUpdate::abandon() noexcept {
  if (is_active()) pager_->abandon();
}

}  // namespace headroom
