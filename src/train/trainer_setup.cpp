// What a run needs before its first update: batch, plan, optimizer, and what a snapshot must agree with.
#include "train/trainer_state.h"

#include <headroom/config/accumulation_schedule.h>
#include <headroom/core/log.h>
#include <headroom/core/version.h>
#include <headroom/execute/autocast.h>

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

namespace headroom {

MicroBatch Trainer::State::load(c10::ArrayRef<std::int64_t> indices) const {
  const OwnerScope owner(Owner::kInputs);
  return train_data->load(indices);
}

MicroBatch Trainer::State::probe_batch(std::int64_t size) const {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i) % train_data->size();
  return load(indices);
}

std::int64_t Trainer::State::window_batch() const {
  if (arguments.global_batch_size > 0) return arguments.global_batch_size;
  return arguments.fixed_micro_batch() * AccumulationSchedule::parse(arguments.gradient_accumulation_steps).steps_at(0);
}

Grouping Trainer::State::grouping() const {
  Grouping grouping;
  grouping.num_samples = train_data->size();
  // Without a global batch, the micro-batch and the schedule that the user gave make the window, however the plan splits it.
  grouping.micro_batch = arguments.global_batch_size > 0 ? plan.micro_batch : arguments.fixed_micro_batch();
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
    log_info(choice.reason);
    computes = choice.autocast;
  }
  (computes ? compute_in_half : keep_in_half) = half_type();
}

double Trainer::State::base_learning_rate() const {
  if (arguments.scale_lr_by_batch == 0) return arguments.learning_rate;
  const double scaled = scale_lr_by_batch(arguments.learning_rate, window_batch(), arguments.scale_lr_by_batch);
  log_info(fmt::format("learning rate {:g} x global batch {} / {} = {:g} (linear scaling rule)", arguments.learning_rate, window_batch(),
                       arguments.scale_lr_by_batch, scaled));
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
      for (const at::Tensor& parameter : module->parameters()) ++num_uses[parameter.unsafeGetTensorImpl()];
    }
  }
  for (const auto& [name, parameter] : named_parameters)
    in_backward->expect_backwards(parameter, num_uses.at(parameter.unsafeGetTensorImpl()));
}

std::map<std::string, std::string> Trainer::State::resume_settings() const {
  std::map<std::string, std::string> settings;
  for (const char* name :
       {"model", "model_config", "dataset", "shuffle", "global_batch_size", "optim", "seed", "data_seed", "fp16", "bf16"}) {
    for (const ArgumentField& field : argument_fields()) {
      if (field.name == name) settings[name] = field.get(arguments);
    }
  }
  settings["samples_per_update"] = std::to_string(window_batch());
  // As it was settled: "auto" may mean something else on another machine.
  settings["half_precision_backend"] = compute_in_half ? "autocast" : keep_in_half ? "keep" : "auto";
  return settings;
}

std::string Trainer::State::snapshot_to_resume() const {
  return arguments.resume_from_checkpoint == "last" ? last_snapshot(arguments.output_dir) : arguments.resume_from_checkpoint;
}

RunPlanRequest Trainer::State::planning_request() const {
  RunPlanRequest request;
  request.global_batch = std::min(window_batch(), train_data->size());
  request.fixed_micro_batch = std::min(arguments.fixed_micro_batch(), request.global_batch);
  request.budget_bytes = arguments.memory_budget_bytes;
  request.policy = arguments.gradient_checkpointing;
  request.keep_in_half = keep_in_half;
  request.compute_in_half = compute_in_half;
  request.may_update_in_backward = why_not_in_backward({arguments.max_grad_norm, scaler.enabled(), 1}).empty();
  request.prefetches = arguments.dataloader_num_workers > 0;
  request.optimizer_bytes = optimizer_bytes(arguments.optim);
  request.optimizer_is_allocated = optimizer != nullptr;
  request.remedies = remedies();
  request.cache_folder = arguments.output_dir + "/profile";
  request.cache_key = fmt::format("headroom {} model {} {} data {} threads {} parameters {} {}{}", kVersion, arguments.model,
                                  arguments.model_config, arguments.dataset, at::get_num_threads(), chain.num_parameters(),
                                  arguments.fp16   ? "fp16"
                                  : arguments.bf16 ? "bf16"
                                                   : "fp32",
                                  compute_in_half ? " autocast" : "");
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
