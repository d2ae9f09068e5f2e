// One update, and what happens when memory runs out in the middle of it.
#include "train/trainer_state.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/log.h>
#include <headroom/data/split.h>
#include <headroom/optim/clip.h>

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace headroom {

std::optional<Update> Trainer::State::step(const std::vector<std::int64_t>& samples, LrScheduler& scheduler) {
  const std::int64_t num_items = train_data->count_items(samples);
  request_micro_batches(samples);
  if (plan.update_in_backward) in_backward->arm();
  double loss_sum = 0.0;
  for (std::size_t done = 0; done < samples.size();) {
    const MicroBatch micro = loader->next();
    const c10::ArrayRef<std::int64_t> indices(samples.data() + done, static_cast<std::size_t>(micro.num_samples));
    if (wants_other_plan(micro, indices, done == 0)) return std::nullopt;
    done += static_cast<std::size_t>(micro.num_samples);
    has_planned_size = micro.num_samples == plan.micro_batch;
    const MicroResult result = executor->accumulate(micro, plan.operations_for(micro.num_samples),
                                                    scaler.scale_factor() / static_cast<double>(std::max<std::int64_t>(num_items, 1)));
    loss_sum += result.loss_sum;
    work.num_forwards += result.num_forwards;
    work.num_recomputes += result.num_recomputes;
  }
  Update update;
  update.num_samples = static_cast<std::int64_t>(samples.size());
  update.loss = loss_sum / static_cast<double>(std::max<std::int64_t>(num_items, 1));
  if (plan.update_in_backward) {
    in_backward->finish();
    scheduler.step();
    update.applied = true;
  } else {
    apply(update, scheduler);
  }
  return update;
}

void Trainer::State::request_micro_batches(const std::vector<std::int64_t>& samples) {
  std::size_t first = 0;
  for (const std::int64_t size : balanced_sizes(static_cast<std::int64_t>(samples.size()), plan.micro_batch)) {
    const auto begin = samples.begin() + static_cast<std::ptrdiff_t>(first);
    loader->request({begin, begin + static_cast<std::ptrdiff_t>(size)});
    first += static_cast<std::size_t>(size);
  }
}

void Trainer::State::apply(Update& update, LrScheduler& scheduler) {
  const PhaseScope phase(Phase::kUpdate);
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : named_parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  const bool all_finite = scaler.unscale(gradients);  // of the whole window at once
  update.grad_norm = clip_global_norm(gradients, arguments.max_grad_norm);
  update.applied = all_finite && std::isfinite(update.grad_norm) && std::isfinite(update.loss);
  if (update.applied) {
    const OwnerScope owner(Owner::kOptimizer);
    optimizer->step();
    scheduler.step();
  } else {
    report_not_finite(update);
  }
  scaler.update();
  position.scaler = scaler.state();
  clear_gradients();
}

void Trainer::State::report_not_finite(const Update& update) {
  ++position.num_skipped_updates;
  // Above 1 it may be the scale alone, which is halved now.
  if (scaler.scale_factor() > 1.0 && std::isfinite(update.loss)) {
    return log_warning(fmt::format("update {}: the gradients overflow at a loss scale of {:g}; the update is skipped, the scale reduced",
                                   position.global_step + 1, scaler.scale_factor()));
  }
  std::vector<std::pair<std::string, at::Tensor>> gradients;
  for (const auto& [name, parameter] : named_parameters) gradients.emplace_back(name, parameter.grad());
  const std::string where = first_non_finite(gradients).value_or("(the loss alone)");
  const std::string message = fmt::format("update {}: not finite in the gradient of {}", position.global_step + 1, where);
  if (arguments.error_on_nan) {
    clear_gradients();
    throw Error(ExitCode::kInternal, message + "; stopped because of --error_on_nan");
  }
  log_warning(message + "; the update is skipped");
}

void Trainer::State::clear_gradients() {
  for (auto& [name, parameter] : named_parameters) parameter.mutable_grad() = at::Tensor();
}

Trainer::State::Undo Trainer::State::remember() const {
  Undo undo;
  for (const at::Tensor& buffer : buffers) {
    const at::Tensor bytes = buffer.contiguous();
    undo.buffers.emplace_back(static_cast<const char*>(bytes.data_ptr()), bytes.nbytes());
  }
  return undo;
}

void Trainer::State::undo_step(const Undo& undo) {
  release_failed_backward();
  loader->clear();
  if (timeline.is_recording()) timeline.start();  // the step is made again, by another plan
  clear_gradients();
  undo.random.restore();
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    std::string bytes = undo.buffers[i];
    buffers[i].copy_(torch::from_blob(bytes.data(), buffers[i].sizes(), buffers[i].options()));
  }
}

Update Trainer::State::step_within_budget(const std::vector<std::int64_t>& samples, LrScheduler& scheduler) {
  num_recoveries_here = 0;
  window_shapes.clear();
  const auto num_samples = static_cast<std::int64_t>(samples.size());
  const Undo undo = remember();
  while (true) {
    std::string reason;
    try {
      if (const std::optional<Update> update = step(samples, scheduler)) return *update;
    } catch (const c10::OutOfMemoryError& error) {
      reason = error.what_without_backtrace();
    }
    // Outside of the handler: the exception itself may hold tensors.
    if (plan.update_in_backward) in_backward->disarm();
    if (reason.empty()) {
      undo_step(undo);
      plan_or_save([&] { plan_for_window(num_samples); });
      continue;
    }
    if (plan.update_in_backward) {
      throw BudgetError(
          fmt::format("memory ran out while parameters were updated inside backward, which cannot be undone ({}); resume from "
                      "the last snapshot with a larger --memory_budget",
                      reason));
    }
    undo_step(undo);
    plan_or_save([&] { plan_anew(reason, num_samples); });
  }
}

void Trainer::State::plan_or_save(const std::function<void()>& make) {
  try {
    make();
  } catch (const BudgetError& error) {
    MemoryMeter::instance().set_cap(0);  // saving copies nothing large, but must not fail for a few bytes
    const std::string folder = save_snapshot(arguments.output_dir, chain, *optimizer, position, arguments.save_total_limit);
    throw BudgetError(fmt::format("{}; the last good state is in {}", error.what(), folder));
  }
}

void Trainer::State::plan_anew(const std::string& reason, std::int64_t window) {
  const std::int64_t cap = MemoryMeter::instance().cap();
  if (cap == 0) throw BudgetError(fmt::format("memory ran out ({}); set --memory_budget to what this machine can give", reason));
  ++num_recoveries;
  position.micro_batch_by_shape.clear();  // what fitted before may not fit now
  RunPlanRequest request = planning_request();
  request.budget_bytes = cap;
  request.policy = "optimal";
  request.global_batch = std::max(window, plan.global_batch);
  // Twice at the same update: the prediction was too low for some reason outside of it, and a part of the budget is left free.
  request.slack_bytes = num_recoveries_here * (cap / 50);
  ++num_recoveries_here;
  for (auto& [key, entry] : buckets) entry.plan.reset();  // they were made for another cap
  use_plan(plan_with_any_split(std::move(request)));
  log_warning(fmt::format("update {}: memory ran out ({}); the step is undone and made again with {} x {} samples, predicted peak {} of {}",
                          position.global_step + 1, reason, plan.num_micro_batches, plan.micro_batch,
                          format_bytes(plan.predicted_peak_bytes), format_bytes(cap)));
}

}  // namespace headroom
