// One update, and what happens when memory runs out in the middle of it.
#include "train/trainer_state.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/data/split.h>
#include <headroom/optim/clip.h>

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

namespace headroom {

Update Trainer::State::train_window(const std::vector<std::int64_t>& samples,
                                    LrScheduler& scheduler) {
  num_recoveries_here = 0;
  window_shapes.clear();
  const auto num_samples = static_cast<std::int64_t>(samples.size());
  const std::int64_t num_items = std::max<std::int64_t>(train_data->count_items(samples), 1);
  const Undo undo = remember();
  while (true) {
    const ShareReport agreed = agree(*comm, run_share(samples, num_items));
    stops = agreed.stop_requested;
    if (agreed.outcome == ShareOutcome::kDone)
      return finish_window(agreed, num_samples, num_items, scheduler);
    if (plan.update_in_backward) in_backward->disarm();
    if (plan.update_in_backward && agreed.outcome == ShareOutcome::kOutOfMemory) {
      throw BudgetError(
          fmt::format("memory ran out while parameters were updated inside backward, which cannot "
                      "be undone ({}); resume from "
                      "the last snapshot with a larger --memory_budget",
                      agreed.reason));
    }
    undo_step(undo);
    plan_or_save([&] {
      agreed.outcome == ShareOutcome::kOutOfMemory ? plan_anew(agreed, num_samples)
                                                   : plan_for_window(agreed, num_samples);
    });
  }
}

ShareReport Trainer::State::run_share(const std::vector<std::int64_t>& window,
                                      std::int64_t num_items) {
  const Share share =
      share_of(static_cast<std::int64_t>(window.size()), comm->rank(), comm->size());
  ShareReport report;
  try {
    accumulate({window.begin() + share.begin, window.begin() + share.end}, num_items, report);
    if (report.outcome == ShareOutcome::kDone) make_ready_to_sum(report);
  } catch (const c10::OutOfMemoryError& error) {
    report.outcome = ShareOutcome::kOutOfMemory;
    report.reason = error.what_without_backtrace();
  }
  report.shapes = window_shapes;
  report.cap_bytes = MemoryMeter::instance().cap();
  report.stop_requested = stop_is_requested();
  return report;
}

void Trainer::State::accumulate(const std::vector<std::int64_t>& share, std::int64_t num_items,
                                ShareReport& report) {
  request_micro_batches(share);
  if (plan.update_in_backward) in_backward->arm();
  for (std::size_t done = 0; done < share.size();) {
    const MicroBatch micro = loader->next();
    if (wants_other_plan(micro, done == 0)) {
      report.outcome = ShareOutcome::kWantsOtherPlan;
      report.samples.assign(share.begin() + static_cast<std::ptrdiff_t>(done),
                            share.begin() + static_cast<std::ptrdiff_t>(done) + micro.num_samples);
      return;
    }
    done += static_cast<std::size_t>(micro.num_samples);
    has_planned_size = micro.num_samples == plan.micro_batch;
    const MicroResult result =
        executor->accumulate(micro, plan.operations_for(micro.num_samples),
                             scaler.scale_factor() / static_cast<double>(num_items));
    report.loss_sum += result.loss_sum;
    work.num_forwards += result.num_forwards;
    work.num_recomputes += result.num_recomputes;
  }
}

void Trainer::State::request_micro_batches(const std::vector<std::int64_t>& samples) {
  std::size_t first = 0;
  for (const std::int64_t size :
       balanced_sizes(static_cast<std::int64_t>(samples.size()), plan.micro_batch)) {
    const auto begin = samples.begin() + static_cast<std::ptrdiff_t>(first);
    loader->request({begin, begin + static_cast<std::ptrdiff_t>(size)});
    first += static_cast<std::size_t>(size);
  }
}

void Trainer::State::make_ready_to_sum(ShareReport& report) {
  if (comm->size() == 1) return;
  const PhaseScope phase(Phase::kUpdate);
  std::string has_gradient;
  for (auto& [name, parameter] : named_parameters) {
    has_gradient += parameter.grad().defined() ? '1' : '0';
    const OwnerScope owner(Owner::kGradients);
    if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  if (has_gradient.find('0') != std::string::npos) report.has_gradient = has_gradient;
  const OwnerScope owner(Owner::kOther);
  scratch = torch::empty({scratch_bytes()}, torch::kByte);
}

std::int64_t Trainer::State::scratch_bytes() const {
  return std::max(exchange_scratch_bytes(chain.parameters(), num_ranks),
                  exchange_scratch_bytes(buffers, num_ranks));
}

Update Trainer::State::finish_window(const ShareReport& agreed, std::int64_t num_samples,
                                     std::int64_t num_items, LrScheduler& scheduler) {
  Update update;
  update.num_samples = num_samples;
  update.loss = agreed.loss_sum / static_cast<double>(num_items);
  if (plan.update_in_backward) {
    in_backward->finish();
    scheduler.step();
    update.applied = true;
    return update;
  }
  const PhaseScope phase(Phase::kUpdate);
  for (std::size_t i = 0; i < agreed.has_gradient.size(); ++i) {
    if (agreed.has_gradient[i] == '0')
      named_parameters[i].second.mutable_grad() = at::Tensor();  // no rank used it
  }
  comm->sum(gradients(), scratch);    // once per update
  comm->broadcast(buffers, scratch);  // rank 0's statistics of BatchNorm are everyone's
  scratch.reset();
  apply(update, scheduler);
  return update;
}

std::vector<at::Tensor> Trainer::State::gradients() const {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : named_parameters) {
    if (parameter.grad().defined()) result.push_back(parameter.grad());
  }
  return result;
}

void Trainer::State::apply(Update& update, LrScheduler& scheduler) {
  const std::vector<at::Tensor> all = gradients();
  const bool all_finite = scaler.unscale(all);  // of the whole window at once
  update.grad_norm = clip_global_norm(all, arguments.max_grad_norm);
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
    return warn(
        fmt::format("update {}: the gradients overflow at a loss scale of {:g}; the update is "
                    "skipped, the scale reduced",
                    position.global_step + 1, scaler.scale_factor()));
  }
  std::vector<std::pair<std::string, at::Tensor>> named_gradients;
  for (const auto& [name, parameter] : named_parameters)
    named_gradients.emplace_back(name, parameter.grad());
  const std::string where = first_non_finite(named_gradients).value_or("(the loss alone)");
  const std::string message =
      fmt::format("update {}: not finite in the gradient of {}", position.global_step + 1, where);
  if (arguments.error_on_nan) {
    clear_gradients();
    throw Error(ExitCode::kInternal, message + "; stopped because of --error_on_nan");
  }
  warn(message + "; the update is skipped");
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
  scratch.reset();
  clear_gradients();
  undo.random.restore();
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    std::string bytes = undo.buffers[i];
    buffers[i].copy_(torch::from_blob(bytes.data(), buffers[i].sizes(), buffers[i].options()));
  }
}

void Trainer::State::plan_or_save(const std::function<void()>& make) {
  try {
    make();
  } catch (const BudgetError& error) {
    MemoryMeter::instance().set_cap(
        0);  // saving copies nothing large, but must not fail for a few bytes
    throw BudgetError(fmt::format("{}; the last good state is in {}", error.what(), save()));
  }
}

void Trainer::State::plan_anew(const ShareReport& agreed, std::int64_t num_samples) {
  const std::int64_t cap = agreed.cap_bytes;
  if (cap == 0)
    throw BudgetError(fmt::format(
        "memory ran out ({}); set --memory_budget to what this machine can give", agreed.reason));
  ++num_recoveries;
  position.micro_batch_by_shape.clear();                  // what fitted before may not fit now
  for (auto& [key, entry] : buckets) entry.plan.reset();  // they were made for another cap
  use_plan(plan_together([&] {
    RunPlanRequest request = planning_request();
    request.budget_bytes = cap;
    request.policy = "optimal";
    request.global_batch = std::max(num_samples, plan.global_batch);
    // Twice at the same update: the prediction was too low for some reason outside of it, and a
    // part of the budget is left free.
    request.slack_bytes = num_recoveries_here * (cap / 50);
    return plan_with_any_split(std::move(request));
  }));
  ++num_recoveries_here;
  warn(
      fmt::format("update {}: memory ran out ({}); the step is undone and made again with {} x {} "
                  "samples, predicted peak {} of {}",
                  position.global_step + 1, agreed.reason, plan.num_micro_batches, plan.micro_batch,
                  format_bytes(plan.predicted_peak_bytes), format_bytes(cap)));
}

}  // namespace headroom
