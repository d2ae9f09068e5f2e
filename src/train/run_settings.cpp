#include "train/run_settings.h"

#include <headroom/core/version.h>
#include <headroom/execute/autocast.h>
#include <headroom/optim/schedule.h>
#include "execute/optimizer_in_backward.h"

#include "config/argument_fields.h"
#include "core/data_fingerprint.h"
#include "optim/optimizer_table.h"

#include "train/auto_budget.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <utility>
#include <vector>

namespace headroom {
namespace {

TrainingArguments validated(TrainingArguments arguments) {
  validate(arguments, {});
  settle_budget(arguments);
  return arguments;
}

Precision choose_precision(const TrainingArguments& arguments) {
  Precision precision;
  if (!arguments.fp16 && !arguments.bf16) return precision;
  const at::ScalarType half = arguments.fp16 ? at::kHalf : at::kBFloat16;
  precision.scales_loss = arguments.fp16;
  bool computes = arguments.half_precision_backend == "autocast";
  if (arguments.half_precision_backend == "auto") {
    const HalfPrecision choice = choose_half_precision(c10::Device(arguments.device), half);
    precision.reason = choice.reason;
    computes = choice.autocast;
  }
  (computes ? precision.compute_in_half : precision.keep_in_half) = half;
  return precision;
}

std::int64_t samples_of_window(const TrainingArguments& arguments,
                               const AccumulationSchedule& schedule, std::int64_t num_ranks,
                               std::int64_t epoch) {
  if (arguments.global_batch_size > 0) return arguments.global_batch_size;
  return arguments.fixed_micro_batch() * schedule.steps_at(epoch) * num_ranks;
}

OptimizerConfig optimizer_of(const TrainingArguments& arguments, std::int64_t global_batch) {
  OptimizerConfig config;
  config.name = optimizer_row(arguments.optim).name;
  config.learning_rate =
      arguments.scale_lr_by_batch == 0
          ? arguments.learning_rate
          : scale_lr_by_batch(arguments.learning_rate, global_batch, arguments.scale_lr_by_batch);
  config.weight_decay = arguments.weight_decay;
  config.beta1 = arguments.adam_beta1;
  config.beta2 = arguments.adam_beta2;
  config.eps = arguments.adam_epsilon;
  config.momentum = arguments.momentum;
  return config;
}

}  // namespace

RunSettings::RunSettings(TrainingArguments given, std::int64_t ranks)
    : arguments(validated(std::move(given))),
      num_ranks(ranks),
      schedule(AccumulationSchedule::parse(arguments.gradient_accumulation_steps)),
      precision(choose_precision(arguments)),
      optimizer(optimizer_of(arguments, samples_of_window(arguments, schedule, ranks, 0))),
      data_fingerprint(headroom::data_fingerprint(arguments.dataset)),
      may_update_in_backward(
          why_not_in_backward({arguments.max_grad_norm, precision.scales_loss, ranks}).empty()) {}

std::int64_t RunSettings::window_samples(std::int64_t epoch) const {
  return samples_of_window(arguments, schedule, num_ranks, epoch);
}

Grouping RunSettings::grouping(const Dataset& data) const {
  Grouping grouping;
  grouping.num_samples = data.size();
  grouping.resamples_each_epoch = data.resamples_each_epoch();
  // Without a global batch, the micro-batch and the schedule that the user gave make the window,
  // however the plan splits it.
  grouping.micro_batch = arguments.global_batch_size > 0 ? 1 : arguments.fixed_micro_batch();
  grouping.num_ranks = num_ranks;
  grouping.global_batch = arguments.global_batch_size;
  grouping.schedule = schedule;
  grouping.drop_last = arguments.dataloader_drop_last;
  grouping.shuffle = arguments.shuffle;
  grouping.seed = arguments.order_seed();
  if (arguments.group_by_length && !data.resamples_each_epoch())
    grouping.length_of = [&data](std::int64_t sample) { return data.length_of(sample); };
  return grouping;
}

std::int64_t RunSettings::total_updates(const Dataset& data) const {
  return arguments.max_steps > 0 ? arguments.max_steps
                                 : grouping(data).num_updates(arguments.num_train_epochs);
}

ExecutorOptions RunSettings::executor_options() const {
  ExecutorOptions options;
  options.check_recomputed_values = arguments.recompute_check;
  options.keep_in_half = precision.keep_in_half;
  options.compute_in_half = precision.compute_in_half;
  if (!arguments.spill_dir.empty()) {
    options.boundary_formats = {KeepAs::kDisk};
    options.spill_dir = arguments.spill_dir;
  }
  return options;
}

std::int64_t RunSettings::optimizer_bytes(const Chain& chain, const std::string& name) const {
  OptimizerConfig config = optimizer;
  config.name = name;
  return optimizer_state_bytes(config, shapes_of(chain.parameters()));
}

std::function<std::int64_t(const at::Tensor&)> RunSettings::state_bytes_of_parameter() const {
  return [config = optimizer](const at::Tensor& parameter) {
    return optimizer_state_bytes(config, {parameter.sizes().vec()});
  };
}

std::map<std::string, std::string> RunSettings::resume_settings() const {
  std::map<std::string, std::string> settings;
  for (const auto& [name, value] : settings_with(FieldTrait::kInSnapshot, arguments))
    settings[name] = value;
  settings["contents of the dataset"] = data_fingerprint;
  settings["samples_per_update"] = std::to_string(window_samples());
  // As it was settled: "auto" may mean something else on another machine.
  settings["half_precision_backend"] = precision.compute_in_half ? "autocast"
                                       : precision.keep_in_half  ? "keep"
                                                                 : "auto";
  return settings;
}

std::string RunSettings::cost_key(const Chain& chain) const {
  std::string key =
      fmt::format("headroom {} threads {} parameters {}{}", kVersion, at::get_num_threads(),
                  chain.num_parameters(), precision.compute_in_half ? " autocast" : "");
  for (const auto& [name, value] : settings_with(FieldTrait::kAffectsCosts, arguments))
    key += fmt::format(" {} {}", name, value);
  return key;
}

std::string RunSettings::learning_rate_note() const {
  if (arguments.scale_lr_by_batch == 0) return {};
  return fmt::format("learning rate {:g} x global batch {} / {} = {:g} (linear scaling rule)",
                     arguments.learning_rate, window_samples(), arguments.scale_lr_by_batch,
                     optimizer.learning_rate);
}

}  // namespace headroom
