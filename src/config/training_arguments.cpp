#include <headroom/config/training_arguments.h>

#include <headroom/config/accumulation_schedule.h>
#include <headroom/core/error.h>
#include "config/argument_fields.h"
#include "core/integers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <system_error>

namespace headroom {
namespace {

// However the micro-batch, the steps and the ranks are multiplied, an update has at most
// kMaxBatchSamples.
void validate_model(const TrainingArguments& arguments, const std::set<std::string>& given) {
  if (given.count("model_name_or_path") == 0) return;
  if (arguments.model_name_or_path.empty())
    reject_argument("model_name_or_path", "", "expected a folder with a model");
  for (const char* other : {"model", "model_config"}) {
    if (given.count(other) != 0) {
      throw ConfigError(
          fmt::format("--model_name_or_path says what the model is, by the config.json "
                      "of its folder: leave --{} out",
                      other));
    }
  }
}

void validate_adapters(const TrainingArguments& arguments, const std::set<std::string>& given) {
  if (arguments.lora_r > 0) {
    if (arguments.lora_alpha == 0) reject_argument("lora_alpha", "0", "must be above 0");
    return;
  }
  for (const char* name : {"lora_alpha", "lora_dropout", "lora_target_modules", "lora_merge"}) {
    if (given.count(name) != 0)
      throw ConfigError(fmt::format("--{} is for adapters: add --lora_r, 8 say", name));
  }
}

void validate_accumulation(const TrainingArguments& arguments) {
  AccumulationSchedule schedule;
  try {
    schedule = AccumulationSchedule::parse(arguments.gradient_accumulation_steps);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("--gradient_accumulation_steps: {}", error.what()));
  }
  if (arguments.global_batch_size > 0) return;
  const auto samples = checked_product(
      {arguments.fixed_micro_batch(), schedule.max_steps(), arguments.nproc_per_node});
  if (samples && *samples <= kMaxBatchSamples) return;
  throw ConfigError(fmt::format(
      "an update of --per_device_train_batch_size {} x --gradient_accumulation_steps {} x "
      "--nproc_per_node {} samples is above the limit of {}",
      arguments.fixed_micro_batch(), schedule.max_steps(), arguments.nproc_per_node,
      kMaxBatchSamples));
}

void validate_device(const std::string& device) {
  if (device == "cpu") return;
  if (device == "cuda" || device.rfind("cuda:", 0) == 0)
    reject_argument("device", device, "training on CUDA is not built in; use --device cpu");
  reject_argument("device", device, "expected cpu");
}

void validate_precision(const TrainingArguments& arguments) {
  const std::string& backend = arguments.half_precision_backend;
  if (arguments.fp16 && arguments.bf16)
    throw ConfigError("--fp16 and --bf16 exclude each other: choose one");
  if (backend != "auto" && !arguments.fp16 && !arguments.bf16) {
    throw ConfigError(fmt::format(
        "--half_precision_backend {} says how half precision is used: add --bf16 or --fp16",
        backend));
  }
  if (backend == "autocast" && arguments.fp16 && arguments.device == "cpu") {
    throw ConfigError(
        "autocast on the cpu does not compute in fp16: choose --bf16, or --half_precision_backend "
        "keep");
  }
}

void validate_checkpointing(const TrainingArguments& arguments) {
  const std::string& policy = arguments.gradient_checkpointing;
  if (policy.empty()) return;
  if (policy.rfind("segments=", 0) == 0) {
    const std::string count = policy.substr(9);
    const bool is_number = !count.empty() && count.size() < 10 &&
                           count.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number || std::stoll(count) < 1)
      reject_argument("gradient_checkpointing", policy,
                      "K must be a whole number of 1 or more, e.g. segments=4");
    return;
  }
  require_one_of("gradient_checkpointing", policy,
                 {"every", "sqrt", "log", "optimal", "none", "segments=K"});
  if (policy == "optimal" && !arguments.has_budget()) {
    throw ConfigError(
        "--gradient_checkpointing optimal needs a budget to be optimal for: add --memory_budget");
  }
}

void validate_spill_dir(const TrainingArguments& arguments, const std::set<std::string>& given) {
  const std::string& folder = arguments.spill_dir;
  if (folder.empty()) {
    if (given.count("spill_dir") != 0)
      reject_argument("spill_dir", folder, "expected a folder; leave the flag out for no spilling");
    return;
  }
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    reject_argument("spill_dir", folder, "there is no such folder; make it first");
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    reject_argument("spill_dir", folder, "this folder cannot be written");
  if (given.count("spill_dir") != 0 && !arguments.has_budget()) {
    throw ConfigError("--spill_dir is for plans that must fit a budget: add --memory_budget");
  }
}

void validate_evaluation(const TrainingArguments& arguments) {
  if (arguments.eval_strategy != "no") return;
  if (arguments.load_best_model_at_end) {
    throw ConfigError(
        "--load_best_model_at_end chooses among evaluations: add --eval_strategy steps or epoch");
  }
  if (arguments.early_stopping_patience > 0) {
    throw ConfigError(
        "--early_stopping_patience counts evaluations: add --eval_strategy steps or epoch");
  }
}

}  // namespace

void validate(const TrainingArguments& arguments, const std::set<std::string>& given) {
  for (const ArgumentField& field : argument_fields()) field.check(arguments);
  if (given.count("per_device_train_batch_size") != 0 && arguments.per_device_train_batch_size == 0)
    reject_argument("per_device_train_batch_size", "0", "must be 1 or more");
  if (arguments.max_steps == 0) reject_argument("max_steps", "0", "must be 1 or more, or -1");
  if (arguments.max_steps < 0 && arguments.num_train_epochs == 0)
    reject_argument("num_train_epochs", "0", "must be above 0");
  validate_model(arguments, given);
  validate_adapters(arguments, given);
  validate_checkpointing(arguments);
  validate_spill_dir(arguments, given);
  validate_accumulation(arguments);

  validate_precision(arguments);
  validate_evaluation(arguments);
  if (arguments.global_batch_size > 0 && given.count("gradient_accumulation_steps") != 0) {
    throw ConfigError(
        "--global_batch_size and --gradient_accumulation_steps both say how many samples make an "
        "update: give one of them");
  }
  if (arguments.global_batch_size > 0 &&
      arguments.per_device_train_batch_size > arguments.global_batch_size) {
    throw ConfigError(
        fmt::format("--per_device_train_batch_size {} is above --global_batch_size {}",
                    arguments.per_device_train_batch_size, arguments.global_batch_size));
  }
  validate_device(arguments.device);
  if (arguments.output_dir.empty()) reject_argument("output_dir", "", "must not be empty");
}

}  // namespace headroom
