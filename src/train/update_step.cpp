#include "train/update_step.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/optim/optimizer.h>
#include "core/log.h"
#include "execute/non_finite.h"

#include "train/stop.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <utility>

namespace headroom {
namespace {

std::vector<at::Tensor> buffers_of(const Chain& chain) {
  std::vector<at::Tensor> buffers;
  for (const auto& [name, buffer] : chain.named_buffers()) buffers.push_back(buffer);
  return buffers;
}

LearningRateSchedule schedule_of(const RunSettings& settings, const Dataset& data) {
  return LearningRateSchedule(parse_schedule_kind(settings.arguments.lr_scheduler_type),
                              settings.total_updates(data), settings.arguments.warmup_steps);
}

template <std::size_t size>
void keep_largest(std::array<std::int64_t, size>& most, const std::array<std::int64_t, size>& now) {
  for (std::size_t i = 0; i < size; ++i) most[i] = std::max(most[i], now[i]);
}

// Calls what writes weights and state back.
template <typename Call>
void saying_what_is_lost(const Call& call) {
  constexpr const char* kWhat =
      "; parameters were being updated, which cannot be undone: continue from the last snapshot";
  try {
    call();
  } catch (const BudgetError& error) {
    throw BudgetError(error.what() + std::string(kWhat));
  } catch (const DataError& error) {
    throw DataError(error.what() + std::string(kWhat));
  }
}

}  // namespace

UpdateStep::UpdateStep(const RunSettings& settings, const Chain& chain, const Dataset& data,
                       WindowPlans& plans, const RankGroup& ranks, StepHooks hooks,
                       StaticPager* pager)
    : settings_(settings),
      chain_(chain),
      data_(data),
      plans_(plans),
      ranks_(ranks),
      hooks_(std::move(hooks)),
      parameters_(chain.named_parameters()),
      buffers_(buffers_of(chain)),
      optimizer_(make_optimizer(settings.optimizer, parameters_)),
      scheduler_(*optimizer_, schedule_of(settings, data)),
      scaler_(settings.precision.scales_loss ? GradScalerOptions{} : GradScalerOptions::disabled()),
      pages_(pager, *optimizer_, scaler_, parameters_),
      summed_loss_(chain, executor_options()),
      loader_(
          [&data](c10::ArrayRef<std::int64_t> indices) {
            const OwnerScope owner(Owner::kInputs);
            return data.load(indices);
          },
          settings.arguments.dataloader_num_workers > 0) {
  if (compares_embeddings(chain))
    compared_loss_ = std::make_unique<ComparedLoss>(chain, executor_options(), data, ranks);
}

UpdateStep::~UpdateStep() = default;

ExecutorOptions UpdateStep::executor_options() {
  ExecutorOptions options = settings_.executor_options();
  options.before_operation = [this](std::size_t operation) {
    if (pages_.is_active()) pages_.before_operation(operation);
  };
  options.on_operation = [this](std::size_t operation) {
    if (pages_.is_active()) pages_.after_operation(operation);
    if (hooks_.on_operation) hooks_.on_operation(operation, has_planned_size_);
    if (!plans_.plan().updates_in_backward() && !pages_.is_midway()) throw_if_stopped();
  };
  return options;
}

void UpdateStep::prepare() { pages_.adopt(plans_.plan().paging); }

void UpdateStep::resume(std::int64_t num_applied, const GradScalerState& scaler) {
  scheduler_.set_update(num_applied);
  scaler_.restore(scaler);
}

Update UpdateStep::run(const Window& window) {
  const StepUndo undo(buffers_);
  try {
    // Another plan may have to be measured, with gradients of its own.
    if (plans_.plan().global_batch != window.full_size) finish();
    plans_.begin_window(window);
    while (true) {
      pages_.adopt(plans_.plan().paging);
      const ShareReport agreed = ranks_.agree(compute_gradients(window));
      if (agreed.outcome == ShareOutcome::kDone) return apply(window, agreed);
      abandon(undo);
      rethrow_failure(agreed);
      finish();
      plans_.replace(agreed, window);
    }
  } catch (...) {
    abandon(undo);
    throw;
  }
}

void UpdateStep::finish() {
  if (!pages_.is_waiting()) return;
  MemoryMeter::instance().reset_peak();
  saying_what_is_lost([&] { pages_.finish(); });
  keep_peaks();
}

ShareReport UpdateStep::compute_gradients(const Window& window) {
  MemoryMeter::instance().reset_peak();
  const Share places = share_of(window.num_samples(), ranks_.rank(), ranks_.size());
  const std::vector<std::int64_t> share(window.samples.begin() + places.begin,
                                        window.samples.begin() + places.end);
  WindowLoss& loss = loss_of_window();
  failure_ = nullptr;
  ShareReport report;
  attempt(report, [&] {
    throw_if_stopped();
    num_items_ = std::max<std::int64_t>(data_.count_items(window.samples), 1);
    loss.prepare(window, [&](const auto& visit) {
      walk(share, report, [&](const MicroBatch& micro, bool) { visit(micro); });
    });
  });
  if (loss.is_prepared(report.outcome == ShareOutcome::kDone)) {
    attempt(report, [&] {
      accumulate(share, loss, report);
      if (report.outcome == ShareOutcome::kDone) make_ready_to_sum(report);
    });
  }
  keep_peaks();
  report.shapes = plans_.window_shapes();
  report.cap_bytes = MemoryMeter::instance().cap();
  return report;
}

template <typename Work>
void UpdateStep::attempt(ShareReport& report, const Work& work) {
  try {
    work();
  } catch (const c10::OutOfMemoryError& error) {
    report.outcome = ShareOutcome::kOutOfMemory;
    report.reason = error.what_without_backtrace();
  } catch (const Stopped&) {
    report.outcome = ShareOutcome::kStopped;
  } catch (const std::exception& error) {
    failure_ = std::current_exception();
    report.outcome = ShareOutcome::kFailed;
    report.reason = error.what();
    report.reason.resize(std::min(report.reason.find('\n'), report.reason.size()));
  }
}

WindowLoss& UpdateStep::loss_of_window() {
  const bool is_whole = ranks_.size() == 1 && plans_.plan().num_micro_batches() == 1;
  if (!compared_loss_ || is_whole) return summed_loss_;
  return *compared_loss_;
}

template <typename Work>
void UpdateStep::walk(const std::vector<std::int64_t>& share, ShareReport& report,
                      const Work& work) {
  request_micro_batches(share);
  for (std::size_t done = 0; done < share.size();) {
    const MicroBatch micro = next_micro_batch();
    if (!plans_.serves(micro, done == 0)) {
      report.outcome = ShareOutcome::kWantsOtherPlan;
      report.samples.assign(share.begin() + static_cast<std::ptrdiff_t>(done),
                            share.begin() + static_cast<std::ptrdiff_t>(done) + micro.num_samples);
      return;
    }
    done += static_cast<std::size_t>(micro.num_samples);
    throw_if_stopped();
    work(micro, done == share.size());
  }
}

void UpdateStep::accumulate(const std::vector<std::int64_t>& share, WindowLoss& loss,
                            ShareReport& report) {
  const RunPlan& plan = plans_.plan();
  if (pages_.is_active()) pages_.start(plan, micro_batch_sizes(share.size()));
  report.loss_sum = loss.begin(scaler_.scale_factor() / static_cast<double>(num_items_));
  walk(share, report, [&](const MicroBatch& micro, bool is_last) {
    has_planned_size_ = micro.num_samples == plan.micro_batch();
    if (plan.updates_in_backward() && is_last) update_inside_next_backward();
    const MicroResult result = loss.accumulate(micro, plan.batch.operations_for(micro.num_samples));
    report.loss_sum += result.loss_sum;
    work_.num_forwards += result.num_forwards;
    work_.num_recomputes += result.num_recomputes;
  });
  loss.end();
}

std::vector<std::int64_t> UpdateStep::micro_batch_sizes(std::size_t num_samples) const {
  return balanced_sizes(static_cast<std::int64_t>(num_samples), plans_.plan().micro_batch());
}

MicroBatch UpdateStep::next_micro_batch() {
  const auto started = std::chrono::steady_clock::now();
  MicroBatch micro = loader_.next();
  data_wait_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return micro;
}

void UpdateStep::request_micro_batches(const std::vector<std::int64_t>& samples) {
  std::size_t first = 0;
  for (const std::int64_t size : micro_batch_sizes(samples.size())) {
    const auto begin = samples.begin() + static_cast<std::ptrdiff_t>(first);
    loader_.request({begin, begin + static_cast<std::ptrdiff_t>(size)});
    first += static_cast<std::size_t>(size);
  }
}

void UpdateStep::update_inside_next_backward() {
  if (!in_backward_) {
    in_backward_ = std::make_unique<OptimizerInBackward>(*optimizer_);
    std::map<const void*, std::int64_t> num_uses;
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      if (const auto module = chain_.stage(i).module()) {
        for (const at::Tensor& parameter : module->parameters())
          ++num_uses[parameter.unsafeGetTensorImpl()];
      }
    }
    for (const auto& [name, parameter] : parameters_)
      in_backward_->expect_backwards(parameter, num_uses.at(parameter.unsafeGetTensorImpl()));
  }
  in_backward_->arm();
  is_intact_ = false;
}

void UpdateStep::make_ready_to_sum(ShareReport& report) {
  if (ranks_.size() == 1) return;
  const PhaseScope phase(Phase::kUpdate);
  std::string has_gradient;
  for (auto& [name, parameter] : parameters_) {
    has_gradient += parameter.grad().defined() ? '1' : '0';
    const OwnerScope owner(Owner::kGradients);
    if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  if (has_gradient.find('0') != std::string::npos) report.has_gradient = has_gradient;
  const OwnerScope owner(Owner::kOther);
  scratch_ = torch::empty({update_scratch_bytes(chain_, ranks_.size())}, torch::kByte);
}

void UpdateStep::rethrow_failure(const ShareReport& agreed) {
  if (agreed.outcome == ShareOutcome::kStopped) throw Stopped();
  if (failure_) std::rethrow_exception(failure_);
  if (agreed.outcome == ShareOutcome::kFailed) throw OtherRankFailed(agreed.reason);
  if (!is_intact()) {
    throw BudgetError(
        fmt::format("memory ran out while parameters were being updated, which cannot be undone "
                    "({}); resume from the last snapshot with a larger --memory_budget",
                    agreed.reason));
  }
}

Update UpdateStep::apply(const Window& window, const ShareReport& agreed) {
  const PhaseScope phase(Phase::kUpdate);
  Update update;
  update.num_samples = window.num_samples();
  update.loss = agreed.loss_sum / static_cast<double>(num_items_);
  update.learning_rate = scheduler_.learning_rate();
  if (plans_.plan().updates_in_backward()) {
    in_backward_->finish();
    is_intact_ = update.applied = true;
  } else {
    sum_over_ranks(agreed);
    update.applied =
        pages_.is_active() ? step_paged(update, window) : clip_and_step(update, window);
  }
  if (update.applied) scheduler_.step();
  update.loss_scale = scaler_.scale_factor();
  keep_peaks();
  update.live_bytes = MemoryMeter::instance().live_bytes();
  update.peak_bytes = peaks_.peak_bytes;
  return update;
}

void UpdateStep::sum_over_ranks(const ShareReport& agreed) {
  for (std::size_t i = 0; i < agreed.has_gradient.size(); ++i) {
    if (agreed.has_gradient[i] == '0')
      parameters_[i].second.mutable_grad() = at::Tensor();  // no rank used it
  }
  ranks_.sum(gradients(), scratch_);     // once per update
  ranks_.broadcast(buffers_, scratch_);  // rank 0's statistics of BatchNorm are everyone's
  scratch_.reset();
}

bool UpdateStep::clip_and_step(Update& update, const Window& window) {
  const std::vector<at::Tensor> all = gradients();
  const bool all_finite = scaler_.unscale(all);  // of the whole window at once
  update.grad_norm = clip_global_norm(all, settings_.arguments.max_grad_norm);
  const bool is_finite =
      all_finite && std::isfinite(update.grad_norm) && std::isfinite(update.loss);
  if (is_finite) {
    const OwnerScope owner(Owner::kOptimizer);
    is_intact_ = false;
    optimizer_->step();
    is_intact_ = true;
  } else {
    const std::string message = describe_skip(update, window, named_gradients());
    if (ranks_.is_first()) log_warning(message);
  }
  scaler_.update();
  clear_gradients();
  return is_finite;
}

// As clip_and_step(), with gradients that were unscaled, and whose squares were summed, when they
// were complete.
bool UpdateStep::step_paged(Update& update, const Window& window) {
  const bool all_finite = scaler_.unscale({});
  update.grad_norm = pages_.grad_norm();
  const bool is_finite =
      all_finite && std::isfinite(update.grad_norm) && std::isfinite(update.loss);
  if (is_finite) {
    is_intact_ = false;
    saying_what_is_lost(
        [&] { pages_.step(clip_factor(update.grad_norm, settings_.arguments.max_grad_norm)); });
    is_intact_ = true;
  } else if (pages_.has_updated()) {
    throw Error(ExitCode::kConfig,
                fmt::format("update {}: the loss is not finite after parameters were updated; "
                            "continue from the last snapshot",
                            window.update));
  } else {
    log_warning(describe_skip(update, window, pages_.finite_like_gradients()));
    pages_.abandon();
  }
  scaler_.update();
  if (!pages_.is_waiting()) clear_gradients();
  return is_finite;
}

NamedParameters UpdateStep::named_gradients() const {
  NamedParameters named;
  for (const auto& [name, parameter] : parameters_) named.emplace_back(name, parameter.grad());
  return named;
}

std::string UpdateStep::describe_skip(const Update& update, const Window& window,
                                      const NamedParameters& gradients) const {
  // Above 1 it may be the scale alone, which is reduced now.
  if (scaler_.scale_factor() > 1.0 && std::isfinite(update.loss)) {
    return fmt::format(
        "update {}: the gradients overflow at a loss scale of {:g}; the update is "
        "skipped, the scale reduced",
        window.update, scaler_.scale_factor());
  }
  return skip_or_throw(
      settings_.arguments.error_on_nan ? NonFinitePolicy::kError : NonFinitePolicy::kSkip,
      window.update, gradients, "(the loss alone)");
}

std::vector<at::Tensor> UpdateStep::gradients() const {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : parameters_) {
    if (parameter.grad().defined()) result.push_back(parameter.grad());
  }
  return result;
}

void UpdateStep::clear_gradients() {
  for (auto& [name, parameter] : parameters_) parameter.mutable_grad() = at::Tensor();
}

void UpdateStep::abandon(const StepUndo& undo) {
  release_failed_backward();
  pages_.abandon();
  if (in_backward_ && in_backward_->armed()) in_backward_->disarm();
  loader_.clear();
  if (compared_loss_) compared_loss_->end();
  scratch_.reset();
  if (!pages_.is_waiting()) clear_gradients();
  undo.restore();
  if (hooks_.on_undo) hooks_.on_undo();
}

void UpdateStep::keep_peaks() {
  const MemoryUse use = MemoryMeter::instance().use();
  peaks_.peak_bytes = std::max(peaks_.peak_bytes, use.peak_bytes);
  keep_largest(peaks_.peak_by_owner, use.peak_by_owner);
  keep_largest(peaks_.peak_by_phase, use.peak_by_phase);
}

}  // namespace headroom
