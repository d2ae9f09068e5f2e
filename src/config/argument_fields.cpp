#include "config/argument_fields.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include "config/task.h"
#include "core/nearest_name.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <system_error>

namespace headroom {
namespace {

using A = TrainingArguments;

constexpr FieldTrait kPerRank = FieldTrait::kPerRank;
constexpr FieldTrait kInSnapshot = FieldTrait::kInSnapshot;
constexpr FieldTrait kAffectsCosts = FieldTrait::kAffectsCosts;

constexpr std::int64_t kAnyInteger = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxUpdates = 1'000'000'000;
constexpr std::int64_t kMaxSnapshots = 1'000'000;
constexpr std::int64_t kMaxRanks = 256;
constexpr std::int64_t kMaxThreads = 1024;
constexpr std::int64_t kMaxTimeoutSeconds = 366 * 24 * 3600;
constexpr std::int64_t kMaxLoraRank = 65536;
constexpr double kMaxEpochs = 1e6;

template <typename Number>
struct Range {
  Number min;
  std::optional<Number> max;  // none: as large as the type
  bool max_is_excluded = false;

  bool contains(Number value) const {
    return value >= min && (!max || (max_is_excluded ? value < *max : value <= *max));
  }
  std::string to_text() const {
    if (!max) return min == 0 ? "0 or more" : fmt::format("{} or more", min);
    return max_is_excluded ? fmt::format("at least {} and below {}", min, *max)
                           : fmt::format("from {} to {}", min, *max);
  }
};

std::int64_t to_integer(const std::string& name, const std::string& text) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size())
    reject_argument(name, text, "expected a whole number");
  return value;
}

double to_double(const std::string& name, const std::string& text) {
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || !std::isfinite(value))
    reject_argument(name, text, "expected a finite number");
  return value;
}

std::int64_t to_bytes(const std::string& name, const std::string& text) {
  try {
    return parse_bytes(text);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("--{}: {}", name, error.what()));
  }
}

bool to_bool(const std::string& name, const std::string& text) {
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == "true" || lower == "1" || lower == "yes") return true;
  if (lower == "false" || lower == "0" || lower == "no") return false;
  reject_argument(name, text, "expected true or false");
}

ArgumentField field(const char* name, const char* help, FieldTrait traits) {
  ArgumentField made;
  made.name = name;
  made.help = help;
  made.traits = traits;
  made.check = [](const A&) {};
  return made;
}

ArgumentField text(const char* name, std::string A::*member, const char* help,
                   FieldTrait traits = FieldTrait::kNone) {
  ArgumentField made = field(name, help, traits);
  made.set = [member](A& a, const std::string& value) { a.*member = value; };
  made.get = [member](const A& a) { return a.*member; };
  return made;
}

// The flag may stand alone.
ArgumentField optional_text(const char* name, std::string A::*member, const char* alone,
                            const char* help, FieldTrait traits = FieldTrait::kNone) {
  ArgumentField made = text(name, member, help, traits);
  made.value_is_optional = true;
  made.value_when_alone = alone;
  return made;
}

ArgumentField choice(const char* name, std::string A::*member, std::vector<std::string> names,
                     const char* help, FieldTrait traits = FieldTrait::kNone) {
  ArgumentField made = text(name, member, help, traits);
  made.range = fmt::format("{}", fmt::join(names, ", "));
  made.help = fmt::format("{}{}{}", made.range, *help == '\0' ? "" : ": ", help);
  made.check = [name, member, names = std::move(names)](const A& a) {
    require_one_of(name, a.*member, names);
  };
  return made;
}

template <typename Number>
ArgumentField number(const char* name, Number A::*member, Range<Number> range, const char* help,
                     FieldTrait traits, Number (*parse)(const std::string&, const std::string&)) {
  ArgumentField made = field(name, help, traits);
  made.range = range.to_text();
  made.set = [=](A& a, const std::string& value) { a.*member = parse(name, value); };
  made.get = [member](const A& a) { return fmt::format("{}", a.*member); };
  made.check = [name, member, range](const A& a) {
    if (!range.contains(a.*member))
      reject_argument(name, fmt::format("{}", a.*member), "must be " + range.to_text());
  };
  return made;
}

ArgumentField integer(const char* name, std::int64_t A::*member, Range<std::int64_t> range,
                      const char* help, FieldTrait traits = FieldTrait::kNone) {
  return number(name, member, range, help, traits, to_integer);
}

ArgumentField real(const char* name, double A::*member, Range<double> range, const char* help,
                   FieldTrait traits = FieldTrait::kNone) {
  return number(name, member, range, help, traits, to_double);
}

ArgumentField on_off(const char* name, bool A::*member, const char* help,
                     FieldTrait traits = FieldTrait::kNone) {
  ArgumentField made = field(name, help, traits);
  made.range = "true or false";
  made.value_is_optional = true;
  made.value_when_alone = "true";
  made.set = [=](A& a, const std::string& value) { a.*member = to_bool(name, value); };
  made.get = [member](const A& a) { return a.*member ? "true" : "false"; };
  return made;
}

ArgumentField bytes_or_auto(const char* name, std::int64_t A::*member, bool A::*is_auto,
                            const char* help, FieldTrait traits = FieldTrait::kNone) {
  ArgumentField made = field(name, help, traits);
  made.range = "1 byte or more, or auto";
  made.set = [name, member, is_auto](A& a, const std::string& value) {
    a.*is_auto = value == "auto";
    a.*member = a.*is_auto ? 0 : to_bytes(name, value);
    if (a.*member == 0 && !(a.*is_auto))
      reject_argument(name, value, "a budget must be above 0; leave the flag out for no budget");
  };
  made.get = [member, is_auto](const A& a) {
    if (a.*is_auto) return std::string("auto");
    return a.*member == 0 ? std::string("none") : std::to_string(a.*member);
  };
  made.check = [name, member](const A& a) {
    if (a.*member < 0)
      reject_argument(name, std::to_string(a.*member), "must not be negative; 0 means no budget");
  };
  return made;
}

ArgumentField task(const char* help) {
  ArgumentField made = text("task", &A::task, help, kInSnapshot | kAffectsCosts);
  made.range = fmt::format("{}", fmt::join(task_names(), ", "));
  made.help = fmt::format("{}: {}", made.range, help);
  made.check = [](const A& a) {
    if (!a.task.empty()) parse_task(a.task);
  };
  return made;
}

// A flag is one row in one of these groups and one member of TrainingArguments.
std::vector<ArgumentField> model_fields() {
  return {
      text("model", &A::model, "a model of the zoo, or a TorchScript file (PATH.pt)",
           kInSnapshot | kAffectsCosts),
      text("model_config", &A::model_config, "sizes of the model as k=v,...",
           kInSnapshot | kAffectsCosts),
      text("model_name_or_path", &A::model_name_or_path,
           "a folder to start from, as Hugging Face has it: config.json, model.safetensors or "
           "shards",
           kInSnapshot | kAffectsCosts),
      choice("loss", &A::loss, {"cross_entropy", "mse", "bce_with_logits", "model"},
             "of a TorchScript model; model: it reads the targets and returns the loss",
             kInSnapshot | kAffectsCosts),
      on_off("trust_model", &A::trust_model,
             "do not compare a TorchScript model, bit by bit, with its stages before the first "
             "update"),
      integer("lora_r", &A::lora_r, {0, kMaxLoraRank},
              "rank of low-rank adapters (LoRA), everything else being frozen; 0: none",
              kInSnapshot | kAffectsCosts),
      real("lora_alpha", &A::lora_alpha, {0.0, 1e6}, "what adapters add is multiplied by alpha / r",
           kInSnapshot),
      real("lora_dropout", &A::lora_dropout, {0.0, 1.0, true}, "of what adapters are given",
           kInSnapshot | kAffectsCosts),
      text("lora_target_modules", &A::lora_target_modules,
           "layers with adapters, by the ends of their names: a,b or all-linear; default: what is "
           "usual for the model",
           kInSnapshot | kAffectsCosts),
      on_off("lora_merge", &A::lora_merge,
             "also save the model with its adapters merged into it, in output_dir/merged"),
      text("freeze", &A::freeze,
           "parameters that are not trained, by their names or those of modules: a,b.*",
           kInSnapshot | kAffectsCosts),
      task("what is learned; without it, what the model is for"),
  };
}

std::vector<ArgumentField> data_fields() {
  return {
      text("dataset", &A::dataset, "what to train on", kInSnapshot | kAffectsCosts),
      text(
          "tokenizer", &A::tokenizer,
          "of text files: a folder, tokenizer.json, vocab.txt or SentencePiece model; without it a "
          "token is a byte",
          kInSnapshot),
      text("text_column", &A::text_column, "of .csv, .tsv and .jsonl: the text", kInSnapshot),
      text("label_column", &A::label_column, "of .csv, .tsv and .jsonl: the class of a text",
           kInSnapshot),
      text("image_column", &A::image_column,
           "of .csv, .tsv and .jsonl for contrastive models: the path of the text's image",
           kInSnapshot),
      on_off("packing", &A::packing,
             "put several texts into one row of a causal language model; none sees another",
             kInSnapshot | kAffectsCosts),
      on_off("group_by_length", &A::group_by_length,
             "put texts of similar length into one micro-batch, so that less is padding",
             kInSnapshot),
      on_off("shuffle", &A::shuffle, "a new order in each epoch, by data_seed", kInSnapshot),
  };
}

std::vector<ArgumentField> batch_and_memory_fields() {
  return {
      integer("per_device_train_batch_size", &A::per_device_train_batch_size, {0, kMaxBatchSamples},
              "micro-batch: samples in memory at once, on each rank; 0: 8, or the planner's choice "
              "with global_batch_size"),
      text("gradient_accumulation_steps", &A::gradient_accumulation_steps,
           "micro-batches per update on each rank, or a schedule per epoch: 0:8,4:2"),
      integer("global_batch_size", &A::global_batch_size, {0, kMaxBatchSamples},
              "samples per update over all ranks, instead of the two above; 0: their product times "
              "the ranks",
              kInSnapshot),
      on_off("dataloader_drop_last", &A::dataloader_drop_last,
             "drop the last window of an epoch when it is not full"),

      bytes_or_auto("memory_budget", &A::memory_budget_bytes, &A::memory_budget_auto,
                    "bytes that tensors may occupy, per rank, weights and all, e.g. 512MiB; a hard "
                    "cap; auto: what this machine or container can give, less the program itself"),
      text("spill_dir", &A::spill_dir,
           "a folder on disk where the plan for a memory_budget may put activations, when that is "
           "faster, and page weights, gradients and optimizer state that do not fit",
           kPerRank | kAffectsCosts),
      optional_text("gradient_checkpointing", &A::gradient_checkpointing, "every",
                    "recompute without a budget: every, sqrt, log, segments=K or optimal"),
      on_off("recompute_check", &A::recompute_check,
             "verify that recomputed values equal the first ones"),
      on_off("fp16", &A::fp16, "half precision, with dynamic loss scaling",
             kInSnapshot | kAffectsCosts),
      on_off("bf16", &A::bf16, "bfloat16 precision", kInSnapshot | kAffectsCosts),
      choice("half_precision_backend", &A::half_precision_backend, {"auto", "autocast", "keep"},
             "autocast computes in half precision; keep computes in fp32 and keeps activations in "
             "half precision; auto is autocast where that is faster"),
  };
}

std::vector<ArgumentField> optimizer_fields() {
  return {
      text("optim", &A::optim, "the optimizer, with the state that it keeps", kInSnapshot),
      real("learning_rate", &A::learning_rate, {0, {}}, "the highest learning rate"),
      real("weight_decay", &A::weight_decay, {0, {}}, "not applied to biases and norms"),
      real("adam_beta1", &A::adam_beta1, {0, 1, true}, "first moment's decay"),
      real("adam_beta2", &A::adam_beta2, {0, 1, true}, "second moment's decay"),
      real("adam_epsilon", &A::adam_epsilon, {0, {}}, "added to the denominator"),
      real("momentum", &A::momentum, {0, {}}, "of sgd"),
      real("max_grad_norm", &A::max_grad_norm, {0, {}},
           "clip the gradient of the global batch to this norm; 0: no clipping"),
      choice("lr_scheduler_type", &A::lr_scheduler_type, {"constant", "linear", "cosine"}, ""),
      integer("warmup_steps", &A::warmup_steps, {0, kMaxUpdates}, "updates of linear warm-up"),
      integer("scale_lr_by_batch", &A::scale_lr_by_batch, {0, kMaxBatchSamples},
              "learning rate x global batch / this; 0: off"),

      real("num_train_epochs", &A::num_train_epochs, {0, kMaxEpochs}, "passes over the data"),
      integer("max_steps", &A::max_steps, {-1, kMaxUpdates},
              "updates, whatever the epochs; -1: by epochs"),
      integer("seed", &A::seed, {0, kAnyInteger}, "of weights and dropout", kInSnapshot),
      integer("data_seed", &A::data_seed, {-1, kAnyInteger}, "of the order of samples; -1: seed",
              kInSnapshot),
      integer("dataloader_num_workers", &A::dataloader_num_workers, {0, kMaxThreads},
              "threads that read and decode samples ahead of training; 0: load when needed"),
  };
}

std::vector<ArgumentField> evaluation_and_output_fields() {
  return {
      choice("eval_strategy", &A::eval_strategy, {"no", "steps", "epoch"},
             "when to evaluate besides the end"),
      integer("eval_steps", &A::eval_steps, {1, kMaxUpdates},
              "updates between evaluations, with eval_strategy steps"),
      on_off("load_best_model_at_end", &A::load_best_model_at_end,
             "end with the weights of the best evaluation instead of the last ones", kInSnapshot),
      choice("metric_for_best_model", &A::metric_for_best_model,
             {"loss", "accuracy", "f1", "perplexity"}, "what says which evaluation is best",
             kInSnapshot),
      integer("early_stopping_patience", &A::early_stopping_patience, {0, kMaxUpdates},
              "end after so many evaluations in a row without a better one; 0: never"),
      integer("logging_steps", &A::logging_steps, {1, kMaxUpdates}, "updates between logged lines"),
      integer("save_steps", &A::save_steps, {0, kMaxUpdates}, "updates between snapshots; 0: none"),
      integer("save_total_limit", &A::save_total_limit, {0, kMaxSnapshots},
              "snapshots that are kept; 0: all"),
      on_off("save_model", &A::save_model,
             "leave the trained model in output_dir: model.safetensors, config.json", kPerRank),
      text("output_dir", &A::output_dir, "where results, metrics and snapshots go", kPerRank),
      optional_text("resume_from_checkpoint", &A::resume_from_checkpoint, "last",
                    "continue from this snapshot, or from the last one"),
      choice("report_to", &A::report_to, {"none", "jsonl", "tensorboard"}, "", kPerRank),
      on_off("sample", &A::sample, "print generated text at the end (language models)", kPerRank),
      on_off("error_on_nan", &A::error_on_nan,
             "stop at a gradient that is not finite instead of skipping the update"),
  };
}

std::vector<ArgumentField> process_fields() {
  return {
      integer("nproc_per_node", &A::nproc_per_node, {1, kMaxRanks},
              "ranks to train on, started on this machine (or start them with torchrun)", kPerRank),
      integer("ddp_timeout", &A::ddp_timeout, {1, kMaxTimeoutSeconds},
              "seconds that a rank waits for another before it gives up", kPerRank),
      text("device", &A::device, "cpu", kPerRank),
      integer("num_threads", &A::num_threads, {0, kMaxThreads},
              "of each rank; 0: OMP_NUM_THREADS, or an equal share of the cores", kPerRank),
      on_off("disable_tqdm", &A::disable_tqdm, "no progress bar", kPerRank),
      on_off("json", &A::json, "print the results as JSON", kPerRank),
  };
}

// In the order in which --help shows them.
std::vector<ArgumentField> make_fields() {
  std::vector<ArgumentField> all;
  for (const auto& group : {model_fields, data_fields, batch_and_memory_fields, optimizer_fields,
                            evaluation_and_output_fields, process_fields}) {
    for (ArgumentField& field : group()) all.push_back(std::move(field));
  }
  return all;
}

template <typename Predicate>
Settings settings_where(const TrainingArguments& arguments, const Predicate& predicate) {
  Settings settings;
  for (const ArgumentField& field : argument_fields()) {
    if (predicate(field)) settings.emplace_back(field.name, field.get(arguments));
  }
  return settings;
}

}  // namespace

void reject_argument(const std::string& name, const std::string& value,
                     const std::string& expectation) {
  throw ConfigError(fmt::format("--{} '{}': {}", name, value, expectation));
}

void require_one_of(const std::string& name, const std::string& value,
                    const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
  reject_argument(name, value,
                  fmt::format("expected one of {}; did you mean '{}'?", fmt::join(allowed, ", "),
                              nearest_name(value, allowed)));
}

const std::vector<ArgumentField>& argument_fields() {
  static const std::vector<ArgumentField> fields = make_fields();
  return fields;
}

Settings settings_with(FieldTrait trait, const TrainingArguments& arguments) {
  return settings_where(arguments, [&](const ArgumentField& field) { return field.has(trait); });
}

Settings settings_without(FieldTrait trait, const TrainingArguments& arguments) {
  return settings_where(arguments, [&](const ArgumentField& field) { return !field.has(trait); });
}

}  // namespace headroom
