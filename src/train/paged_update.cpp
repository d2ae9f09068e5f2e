#include "train/paged_update.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>

#include <fmt/format.h>

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
  const bool is_in_force =
      pager_ == nullptr ||
      (plan.reads_ahead == pager_->plan().reads_ahead && plan.is_paged == pager_->plan().is_paged &&
       plan.updates == pager_->plan().updates &&
       plan.streams_state == pager_->plan().streams_state);
  if (has_adopted_ && is_in_force) return;
  finish();
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
  needs_step_.clear();
  for (const std::int64_t size : micro_batch_sizes) {
    Schedule schedule;
    schedule.operations = plan.batch.operations_for(size);
    for (PageStep& step : micro_batch_steps(pager_->units(), schedule, !needs_step_.empty()))
      steps.push_back(std::move(step));
    needs_step_.emplace_back();
    for (const Operation& operation : schedule.operations)
      needs_step_.back().push_back(operation.kind != OperationKind::kFree);
  }
  // The first window of a run has no update to carry out.
  const bool puts_off = pager_->plan().updates == UpdateTime::kInNextForward;
  walk(puts_off && !waiting_ ? std::move(steps)
                             : window_steps(pager_->plan(), std::move(steps), 0));
  if (waiting_) factor_ = waiting_->factor;
  scaler_.forget_parts();
  sums_.assign(parameters_.size(), {});
  is_skipping_ = has_updated_ = false;
  micro_ = 0;
}

void PagedUpdate::walk(std::vector<PageStep> steps) {
  next_ = 0;
  factor_ = 1;
  updated_at_.clear();
  completed_at_.assign(steps.size(), {});
  std::vector<std::optional<std::size_t>> last(pager_->units().size());
  for (std::size_t step = 0; step < steps.size(); ++step) {
    updated_at_.push_back(steps[step].updated);
    for (const PageUse& use : steps[step].uses) {
      if (use.page.kind == PageKind::kGradients && !steps[step].updated) last[use.page.unit] = step;
    }
  }
  for (std::size_t unit = 0; unit < last.size(); ++unit) {
    if (last[unit]) completed_at_[*last[unit]].push_back(unit);
  }
  pager_->start(std::move(steps));
}

void PagedUpdate::advance() { pager_->before(next_++); }

void PagedUpdate::run_updates() {
  while (next_ < updated_at_.size() && updated_at_[next_]) {
    const std::size_t unit = *updated_at_[next_];
    is_midway_ = is_midway_ || !is_skipping_;
    advance();
    update_unit(unit);
  }
}

void PagedUpdate::end_walk() {
  advance();
  is_midway_ = false;
}

void PagedUpdate::before_operation(std::size_t operation) {
  if (waiting_) run_updates();
  if (needs_step_[micro_][operation]) advance();
}

void PagedUpdate::after_operation(std::size_t operation) {
  if (needs_step_[micro_][operation]) complete(next_ - 1);
  const bool puts_off = pager_->plan().updates == UpdateTime::kInNextForward;
  if (puts_off && !waiting_) is_midway_ = is_midway_ && pager_->has_unwritten();
  if (operation + 1 < needs_step_[micro_].size()) return;
  ++micro_;
  waiting_.reset();  // every unit is used by a forward
  if (micro_ < needs_step_.size()) return;
  for (const at::Tensor& parameter : others_) complete(parameter);
  if (puts_off) end_walk();
}

void PagedUpdate::complete(std::size_t step) {
  for (const std::size_t unit : completed_at_[step]) {
    for (const at::Tensor& parameter : pager_->parameters(unit)) complete(parameter);
  }
  if (pager_->plan().updates == UpdateTime::kInBackward) run_updates();
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

bool PagedUpdate::is_finite(std::size_t unit) const {
  for (const at::Tensor& parameter : pager_->parameters(unit)) {
    const auto index = index_of_.find(parameter.unsafeGetTensorImpl());
    if (index != index_of_.end() && !std::isfinite(norm_of({sums_[index->second]}))) return false;
  }
  return true;
}

void PagedUpdate::update_unit(std::size_t unit) {
  const PhaseScope phase(Phase::kUpdate);
  const bool in_backward = pager_->plan().updates == UpdateTime::kInBackward;
  if (in_backward && !is_finite(unit)) {
    // Where the loss is not finite, nothing is from the first unit on.
    if (has_updated_) {
      throw Error(ExitCode::kConfig,
                  fmt::format("gradients of '{}' are not finite after other parameters were "
                              "updated; continue from the last snapshot with --max_grad_norm above "
                              "0, which updates after backward",
                              pager_->units()[unit].name));
    }
    is_skipping_ = true;
    is_midway_ = false;
  }
  for (at::Tensor parameter : pager_->parameters(unit)) {
    if (is_skipping_) {
      parameter.mutable_grad() = at::Tensor();
    } else {
      update(parameter, factor_, unit);
    }
  }
  has_updated_ = in_backward && !is_skipping_;
}

void PagedUpdate::step(double factor) {
  if (pager_->plan().updates == UpdateTime::kInNextForward) {
    waiting_ = {factor, {}};
    for (const auto& group : optimizer_.param_groups())
      waiting_->learning_rates.push_back(group.options().get_lr());
  } else {
    factor_ = factor;
    run_updates();
    end_walk();
  }
  for (at::Tensor& parameter : others_) update(parameter, factor);
}

void PagedUpdate::finish() {
  if (!waiting_) return;
  walk(update_steps(pager_->plan(), 0));
  factor_ = waiting_->factor;
  run_updates();
  end_walk();
  waiting_.reset();
}

void PagedUpdate::update(at::Tensor& parameter, double factor, std::optional<std::size_t> unit) {
  const auto group = group_of_.find(parameter.unsafeGetTensorImpl());
  if (group == group_of_.end() || !parameter.grad().defined()) return;
  if (factor < 1.0) parameter.grad().mul_(factor);
  // An update that was put off has the learning rate of its time.
  auto& options = optimizer_.param_groups()[group->second].options();
  const double learning_rate = options.get_lr();
  if (waiting_) options.set_lr(waiting_->learning_rates[group->second]);
  if (unit && pager_->plan().streams(*unit)) {
    pager_->step_streaming(parameter);
  } else {
    optimizer_.step_parameter(parameter, group->second);
  }
  options.set_lr(learning_rate);
  if (unit) {
    pager_->drop_gradient(*unit, parameter);
  } else {
    parameter.mutable_grad() = at::Tensor();
  }
}

void PagedUpdate::abandon() noexcept {
  if (is_active()) pager_->abandon();
}

}  // namespace headroom
