// What a run needs before its first update: batch, plan, optimizer, and what a snapshot must agree
// with.
#include "train/trainer_state.h"

#include <headroom/config/accumulation_schedule.h>
#include <headroom/core/version.h>
#include <headroom/execute/autocast.h>
#include <headroom/optim/clip.h>

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <limits>

namespace headroom {

MicroBatch Trainer::State::load(c10::ArrayRef<std::int64_t> indices) const {
  const OwnerScope owner(Owner::kInputs);
  return train_data->load(indices);
}

MicroBatch Trainer::State::probe_batch(std::int64_t size) const {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
  if (bucket.empty()) {
    for (std::size_t i = 0; i < indices.size(); ++i)
      indices[i] = static_cast<std::int64_t>(i) % train_data->size();
    return load(indices);
  }
  const ShapeBucket& entry = buckets.at(bucket);
  for (std::size_t i = 0; i < indices.size(); ++i)
    indices[i] = entry.samples[i % entry.samples.size()];
  const OwnerScope owner(Owner::kInputs);
  return with_shapes(load(indices), entry.largest);
}

std::int64_t Trainer::State::window_batch() const {
  if (arguments.global_batch_size > 0) return arguments.global_batch_size;
  return arguments.fixed_micro_batch() *
         AccumulationSchedule::parse(arguments.gradient_accumulation_steps).steps_at(0) * num_ranks;
}

Grouping Trainer::State::grouping() const {
  Grouping grouping;
  grouping.num_samples = train_data->size();
  grouping.resamples_each_epoch = train_data->resamples_each_epoch();
  // Without a global batch, the micro-batch and the schedule that the user gave make the window,
  // however the plan splits it.
  grouping.micro_batch = arguments.global_batch_size > 0 ? 1 : arguments.fixed_micro_batch();
  grouping.num_ranks = num_ranks;
  grouping.global_batch = arguments.global_batch_size;
  grouping.schedule = AccumulationSchedule::parse(arguments.gradient_accumulation_steps);
  grouping.drop_last = arguments.dataloader_drop_last;
  grouping.shuffle = arguments.shuffle;
  grouping.seed = arguments.order_seed();
  return grouping;
}

std::optional<at::ScalarType> Trainer::State::half_type() const {
  if (!arguments.fp16 && !arguments.bf16) return std::nullopt;
  return arguments.fp16 ? at::kHalf : at::kBFloat16;
}

void Trainer::State::choose_precision() {
  if (!half_type()) return;
  if (arguments.fp16) scaler = GradScaler();
  bool computes = arguments.half_precision_backend == "autocast";
  if (arguments.half_precision_backend == "auto") {
    const HalfPrecision choice = choose_half_precision(c10::Device(arguments.device), *half_type());
    tell(choice.reason);
    computes = choice.autocast;
  }
  (computes ? compute_in_half : keep_in_half) = half_type();
}

double Trainer::State::base_learning_rate() const {
  if (arguments.scale_lr_by_batch == 0) return arguments.learning_rate;
  const double scaled =
      scale_lr_by_batch(arguments.learning_rate, window_batch(), arguments.scale_lr_by_batch);
  tell(fmt::format("learning rate {:g} x global batch {} / {} = {:g} (linear scaling rule)",
                   arguments.learning_rate, window_batch(), arguments.scale_lr_by_batch, scaled));
  return scaled;
}

OptimizerConfig Trainer::State::optimizer_config() const {
  OptimizerConfig config;
  config.name = arguments.optim;
  config.learning_rate = arguments.learning_rate;
  config.weight_decay = arguments.weight_decay;
  config.beta1 = arguments.adam_beta1;
  config.beta2 = arguments.adam_beta2;
  config.eps = arguments.adam_epsilon;
  config.momentum = arguments.momentum;
  return config;
}

std::int64_t Trainer::State::optimizer_bytes(const std::string& name) const {
  std::vector<std::vector<std::int64_t>> shapes;
  for (const auto& item : named_parameters) shapes.push_back(item.second.sizes().vec());
  OptimizerConfig config = optimizer_config();
  config.name = name;
  return optimizer_state_bytes(config, shapes);
}

std::int64_t Trainer::State::time_update() const {
  for (const std::size_t enough_bytes :
       {std::size_t{16} << 20, std::size_t{4} << 20, std::size_t{1} << 20}) {
    if (const std::int64_t ns = time_update_of_a_part(enough_bytes)) return ns;
  }
  return 0;
}

std::int64_t Trainer::State::time_update_of_a_part(std::size_t enough_bytes) const {
  using Clock = std::chrono::steady_clock;
  constexpr int kNumRuns = 3;
  const OwnerScope owner(Owner::kOther);
  std::size_t all_bytes = 0;
  std::size_t bytes = 0;
  std::int64_t fastest_ns = std::numeric_limits<std::int64_t>::max();
  try {
    std::vector<std::pair<std::string, at::Tensor>> stand_ins;
    std::vector<at::Tensor> gradients;
    for (const auto& [name, parameter] : named_parameters) {
      all_bytes += parameter.nbytes();
      if (bytes >= enough_bytes) continue;
      bytes += parameter.nbytes();
      stand_ins.emplace_back(name, torch::zeros_like(parameter).requires_grad_(true));
      gradients.push_back(
          torch::full_like(parameter, 1e-3, torch::TensorOptions().requires_grad(false)));
      stand_ins.back().second.mutable_grad() = gradients.back();
    }
    const std::unique_ptr<LeanOptimizer> stand_in = make_optimizer(optimizer_config(), stand_ins);
    stand_in->prepare_state();
    for (int run = 0; run <= kNumRuns; ++run) {
      const auto start = Clock::now();
      clip_global_norm(gradients, arguments.max_grad_norm);
      stand_in->step();
      const std::int64_t ns =
          std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
      if (run > 0)
        fastest_ns = std::min(fastest_ns, ns);  // the first one meets memory that was never touched
    }
  } catch (const c10::OutOfMemoryError&) {
    return 0;
  }
  return static_cast<std::int64_t>(static_cast<double>(fastest_ns) *
                                   static_cast<double>(all_bytes) / static_cast<double>(bytes));
}

void Trainer::State::start_optimizer() {
  OptimizerConfig config = optimizer_config();
  config.learning_rate = base_learning_rate();
  optimizer = make_optimizer(config, named_parameters);
  if (plan.update_in_backward) watch_backward();
}

void Trainer::State::prepare_optimizer() {
  const OwnerScope owner(Owner::kOptimizer);
  optimizer->prepare_state();
}

void Trainer::State::watch_backward() {
  in_backward = std::make_unique<OptimizerInBackward>(*optimizer);
  std::map<const void*, std::int64_t> num_uses;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (const auto module = chain.stage(i).module()) {
      for (const at::Tensor& parameter : module->parameters())
        ++num_uses[parameter.unsafeGetTensorImpl()];
    }
  }
  for (const auto& [name, parameter] : named_parameters)
    in_backward->expect_backwards(parameter, num_uses.at(parameter.unsafeGetTensorImpl()));
}

std::map<std::string, std::string> Trainer::State::resume_settings() const {
  std::map<std::string, std::string> settings;
  for (const char* name : {"model", "model_config", "dataset", "shuffle", "global_batch_size",
                           "optim", "seed", "data_seed", "fp16", "bf16"}) {
    for (const ArgumentField& field : argument_fields()) {
      if (field.name == name) settings[name] = field.get(arguments);
    }
  }
  settings["samples_per_update"] = std::to_string(window_batch());
  // As it was settled: "auto" may mean something else on another machine.
  settings["half_precision_backend"] = compute_in_half ? "autocast"
                                       : keep_in_half  ? "keep"
                                                       : "auto";
  return settings;
}

std::string Trainer::State::snapshot_to_resume() {
  if (arguments.resume_from_checkpoint != "last") return arguments.resume_from_checkpoint;
  return comm->broadcast_bytes(comm->is_first() ? last_snapshot(arguments.output_dir) : "");
}

void Trainer::State::plan_from_start(const std::string& snapshot) {
  look_at_first_window();
  std::int64_t saved_micro_batch = 0;
  if (!snapshot.empty()) {
    const TrainingPosition saved = snapshot_position(snapshot, resume_settings());
    position.micro_batch_by_shape = saved.micro_batch_by_shape;
    saved_micro_batch = saved.micro_batch;
  }
  const bool is_measured =
      arguments.memory_budget_bytes > 0 || !arguments.gradient_checkpointing.empty();
  if (comm->is_first() && is_measured) update_ns = time_update();
  use_plan(plan_together([&] {
    RunPlanRequest request = planning_request();
    // Another split would change the order of sums.
    if (request.fixed_micro_batch == 0 && bucket.empty())
      request.fixed_micro_batch = std::min(saved_micro_batch, request.rank_batch());
    return plan_run(request, chain);
  }));
}

void Trainer::State::go_on_from(const std::string& snapshot, WindowWalk& walk,
                                LrScheduler& scheduler) {
  const auto splits = position.micro_batch_by_shape;
  position = load_snapshot(snapshot, chain, *optimizer, resume_settings());
  position.micro_batch_by_shape = splits;
  restore_random_state();
  check_weights_are_equal();
  prepare_optimizer();
  scheduler.set_update(position.global_step - position.num_skipped_updates);
  scaler.restore(position.scaler);
  walk.seek(position.global_step);
  tell(fmt::format("resumed from {} at update {}", snapshot, position.global_step));
}

void Trainer::State::check_batch() const {
  check_split(chain, arguments.fixed_micro_batch(), std::min(window_batch(), train_data->size()),
              num_ranks);
}

RunPlanRequest Trainer::State::planning_request() const {
  RunPlanRequest request;
  request.global_batch = std::min(window_batch(), train_data->size());
  request.num_ranks = num_ranks;
  request.fixed_micro_batch = std::min(arguments.fixed_micro_batch(), request.rank_batch());
  const auto split_before = position.micro_batch_by_shape.find(bucket);
  if (request.fixed_micro_batch == 0 && split_before != position.micro_batch_by_shape.end()) {
    request.fixed_micro_batch =
        std::min(split_before->second,
                 request.rank_batch());  // another split would change the order of sums
  }
  request.budget_bytes = arguments.memory_budget_bytes;
  request.policy = arguments.gradient_checkpointing;
  request.keep_in_half = keep_in_half;
  request.compute_in_half = compute_in_half;
  request.may_update_in_backward =
      why_not_in_backward({arguments.max_grad_norm, scaler.enabled(), num_ranks}).empty();
  request.update_scratch_bytes = scratch_bytes();
  request.spill_dir = arguments.spill_dir;
  request.prefetches = arguments.dataloader_num_workers > 0;
  request.optimizer_bytes = optimizer_bytes(arguments.optim);
  request.optimizer_is_allocated = optimizer != nullptr;
  request.update_ns = update_ns;
  if (plan.is_predicted)
    request.time_ratio = plan.time_ratio;  // while it trains, a run has no time for trials
  request.remedies = remedies();
  request.cache_folder =
      arguments.output_dir + "/profile" + (bucket == first_bucket ? "" : "/" + bucket);
  request.cache_key = fmt::format("headroom {} model {} {} data {} threads {} parameters {} {}{}",
                                  kVersion, arguments.model, arguments.model_config,
                                  arguments.dataset, at::get_num_threads(), chain.num_parameters(),
                                  arguments.fp16   ? "fp16"
                                  : arguments.bf16 ? "bf16"
                                                   : "fp32",
                                  compute_in_half ? " autocast" : "");
  if (!arguments.spill_dir.empty()) request.cache_key += " spill " + arguments.spill_dir;
  if (!bucket.empty()) request.cache_key += " shapes " + to_text(buckets.at(bucket).largest);
  request.load = [this](std::int64_t size) { return probe_batch(size); };
  return request;
}

std::vector<Remedy> Trainer::State::remedies() const {
  std::vector<Remedy> list;
  const std::int64_t now = optimizer_bytes(arguments.optim);
  for (const char* name : {"adamw_8bit", "adafactor", "sgd"}) {
    const std::int64_t other = optimizer_bytes(name);
    if (other < now) list.push_back({fmt::format("choose --optim {}", name), now - other});
  }
  return list;
}

}  // namespace headroom
