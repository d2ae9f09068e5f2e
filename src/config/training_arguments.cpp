#include <headroom/config/training_arguments.h>

#include <headroom/config/accumulation_schedule.h>
#include <headroom/core/bytes.h>
#include <headroom/core/error.h>

#include <fmt/format.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace headroom {
namespace {

[[noreturn]] void reject(const std::string& name, const std::string& value,
                         const std::string& expectation) {
  throw ConfigError(fmt::format("--{} '{}': {}", name, value, expectation));
}

std::int64_t to_integer(const std::string& name, const std::string& text) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size())
    reject(name, text, "expected a whole number");
  return value;
}

double to_double(const std::string& name, const std::string& text) {
  char* stop = nullptr;
  const double value = std::strtod(text.c_str(), &stop);
  if (text.empty() || *stop != '\0' || !std::isfinite(value))
    reject(name, text, "expected a finite number");
  return value;
}

bool to_bool(const std::string& name, const std::string& text) {
  std::string lower = text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == "true" || lower == "1" || lower == "yes") return true;
  if (lower == "false" || lower == "0" || lower == "no") return false;
  reject(name, text, "expected true or false");
}

using A = TrainingArguments;

ArgumentField text_field(std::string name, std::string A::*member, std::string help) {
  return {std::move(name),
          std::move(help),
          false,
          "",
          [member](A& a, const std::string& value) { a.*member = value; },
          [member](const A& a) { return a.*member; }};
}

ArgumentField optional_text_field(std::string name, std::string A::*member, std::string alone,
                                  std::string help) {
  ArgumentField field = text_field(std::move(name), member, std::move(help));
  field.value_is_optional = true;
  field.value_when_alone = std::move(alone);
  return field;
}

ArgumentField integer_field(const std::string& name, std::int64_t A::*member, std::string help) {
  return {name,
          std::move(help),
          false,
          "",
          [name, member](A& a, const std::string& value) { a.*member = to_integer(name, value); },
          [member](const A& a) { return std::to_string(a.*member); }};
}

ArgumentField number_field(const std::string& name, double A::*member, std::string help) {
  return {name,
          std::move(help),
          false,
          "",
          [name, member](A& a, const std::string& value) { a.*member = to_double(name, value); },
          [member](const A& a) { return fmt::format("{:g}", a.*member); }};
}

ArgumentField switch_field(const std::string& name, bool A::*member, std::string help) {
  return {name,
          std::move(help),
          true,
          "true",
          [name, member](A& a, const std::string& value) { a.*member = to_bool(name, value); },
          [member](const A& a) { return a.*member ? "true" : "false"; }};
}

ArgumentField bytes_field(const std::string& name, std::int64_t A::*member, std::string help) {
  return {name,
          std::move(help),
          false,
          "",
          [name, member](A& a, const std::string& value) {
            a.*member = parse_bytes(value);
            if (a.*member == 0)
              reject(name, value, "a budget must be above 0; leave the flag out for no budget");
          },
          [member](const A& a) {
            return a.*member == 0 ? std::string("none") : std::to_string(a.*member);
          }};
}

std::vector<ArgumentField> make_fields() {
  std::vector<ArgumentField> fields = {
      text_field("model", &A::model,
                 "mlp, nin, resnet, vit, vit-b16, vit-l16, bert, bert-base, bert-large, clip, "
                 "clip-vit-b32, gpt, gpt2, gpt2-medium, gpt2-large, gpt2-xl"),
      text_field("model_config", &A::model_config,
                 "sizes of the model as k=v,... (gpt: n_layer, n_head, n_embd, block_size, "
                 "vocab_size, dropout)"),
      text_field(
          "dataset", &A::dataset,
          "fashion-mnist, synthetic, an IDX folder, a text file, or a .bin of uint16 tokens"),
      text_field("tokenizer", &A::tokenizer,
                 "a SentencePiece model for text files; without it a token is a byte"),
      switch_field("shuffle", &A::shuffle, "a new order in each epoch, by data_seed"),
      integer_field("per_device_train_batch_size", &A::per_device_train_batch_size,
                    "micro-batch: samples in memory at once, on each rank; 0: 8, or the planner's "
                    "choice with global_batch_size"),
      text_field("gradient_accumulation_steps", &A::gradient_accumulation_steps,
                 "micro-batches per update on each rank, or a schedule per epoch: 0:8,4:2"),
      integer_field("global_batch_size", &A::global_batch_size,
                    "samples per update over all ranks, instead of the two above; 0: their product "
                    "times the ranks"),
      switch_field("dataloader_drop_last", &A::dataloader_drop_last,
                   "drop the last window of an epoch when it is not full"),
      bytes_field(
          "memory_budget", &A::memory_budget_bytes,
          "bytes that tensors may occupy, per rank, weights and all, e.g. 512MiB; a hard cap"),
      text_field("spill_dir", &A::spill_dir,
                 "a folder on disk where the plan for a memory_budget may put activations, when "
                 "that is faster"),
      optional_text_field("gradient_checkpointing", &A::gradient_checkpointing, "every",
                          "recompute without a budget: every, sqrt, log, segments=K or optimal"),
      switch_field("recompute_check", &A::recompute_check,
                   "verify that recomputed values equal the first ones"),
      switch_field("fp16", &A::fp16, "half precision, with dynamic loss scaling"),
      switch_field("bf16", &A::bf16, "bfloat16 precision"),
      text_field("half_precision_backend", &A::half_precision_backend,
                 "autocast: compute in it; keep: compute in fp32, keep activations in it; auto: "
                 "autocast where it is faster"),
      text_field("optim", &A::optim, "sgd, adam, adamw, adafactor or adamw_8bit"),
      number_field("learning_rate", &A::learning_rate, "the highest learning rate"),
      number_field("weight_decay", &A::weight_decay, "not applied to biases and norms"),
      number_field("adam_beta1", &A::adam_beta1, "first moment's decay"),
      number_field("adam_beta2", &A::adam_beta2, "second moment's decay"),
      number_field("adam_epsilon", &A::adam_epsilon, "added to the denominator"),
      number_field("momentum", &A::momentum, "of sgd"),
      number_field("max_grad_norm", &A::max_grad_norm,
                   "clip the gradient of the global batch to this norm; 0: no clipping"),
      text_field("lr_scheduler_type", &A::lr_scheduler_type, "constant, linear or cosine"),
      integer_field("warmup_steps", &A::warmup_steps, "updates of linear warm-up"),
      integer_field("scale_lr_by_batch", &A::scale_lr_by_batch,
                    "learning rate x global batch / this; 0: off"),
      number_field("num_train_epochs", &A::num_train_epochs, "passes over the data"),
      integer_field("max_steps", &A::max_steps, "updates, whatever the epochs; -1: by epochs"),
      integer_field("seed", &A::seed, "of weights and dropout"),
      integer_field("data_seed", &A::data_seed, "of the order of samples; -1: seed"),
      integer_field("dataloader_num_workers", &A::dataloader_num_workers,
                    "0: load when needed; 1 or more: prefetch on a thread"),
      text_field("eval_strategy", &A::eval_strategy, "no (at the end), steps or epoch"),
      integer_field("eval_steps", &A::eval_steps,
                    "updates between evaluations, with eval_strategy steps"),
      integer_field("logging_steps", &A::logging_steps, "updates between logged lines"),
      integer_field("save_steps", &A::save_steps, "updates between snapshots; 0: none"),
      integer_field("save_total_limit", &A::save_total_limit, "snapshots that are kept; 0: all"),
      text_field("output_dir", &A::output_dir, "where results, metrics and snapshots go"),
      optional_text_field("resume_from_checkpoint", &A::resume_from_checkpoint, "last",
                          "continue from this snapshot, or from the last one"),
      text_field("report_to", &A::report_to, "none, jsonl or tensorboard"),
      switch_field("sample", &A::sample, "print generated text at the end (language models)"),
      switch_field("error_on_nan", &A::error_on_nan,
                   "stop at a gradient that is not finite instead of skipping the update"),
      integer_field("nproc_per_node", &A::nproc_per_node,
                    "ranks to train on, started on this machine (or start them with torchrun)"),
      integer_field("ddp_timeout", &A::ddp_timeout,
                    "seconds that a rank waits for another before it gives up"),
      text_field("device", &A::device, "cpu or cuda[:i]"),
      integer_field("num_threads", &A::num_threads,
                    "of each rank; 0: OMP_NUM_THREADS, or an equal share of the cores"),
      switch_field("disable_tqdm", &A::disable_tqdm, "no progress bar"),
      switch_field("json", &A::json, "print the results as JSON"),
  };
  return fields;
}

void require_positive(const std::string& name, std::int64_t value) {
  if (value < 1) reject(name, std::to_string(value), "must be 1 or more");
}

void require_not_negative(const std::string& name, double value) {
  if (value < 0) reject(name, fmt::format("{:g}", value), "must not be negative");
}

void require_one_of(const std::string& name, const std::string& value,
                    const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return;
  reject(name, value,
         fmt::format("expected one of {}; did you mean '{}'?", fmt::join(allowed, ", "),
                     nearest_name(value, allowed)));
}

void validate_accumulation(const TrainingArguments& arguments) {
  try {
    AccumulationSchedule::parse(arguments.gradient_accumulation_steps);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("--gradient_accumulation_steps: {}", error.what()));
  }
}

void validate_device(const std::string& device) {
  if (device == "cpu" || device == "cuda") return;
  const std::string index = device.rfind("cuda:", 0) == 0 ? device.substr(5) : "";
  if (index.empty() || index.size() > 3 ||
      index.find_first_not_of("0123456789") != std::string::npos) {
    reject("device", device, "expected cpu or cuda[:i]");
  }
}

void validate_precision(const TrainingArguments& arguments) {
  const std::string& backend = arguments.half_precision_backend;
  require_one_of("half_precision_backend", backend, {"auto", "autocast", "keep"});
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
      reject("gradient_checkpointing", policy,
             "K must be a whole number of 1 or more, e.g. segments=4");
    return;
  }
  require_one_of("gradient_checkpointing", policy,
                 {"every", "sqrt", "log", "optimal", "none", "segments=K"});
  if (policy == "optimal" && arguments.memory_budget_bytes == 0) {
    throw ConfigError(
        "--gradient_checkpointing optimal needs a budget to be optimal for: add --memory_budget");
  }
}

void validate_spill_dir(const TrainingArguments& arguments, const std::set<std::string>& given) {
  const std::string& folder = arguments.spill_dir;
  if (folder.empty()) {
    if (given.count("spill_dir") != 0)
      reject("spill_dir", folder, "expected a folder; leave the flag out for no spilling");
    return;
  }
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    reject("spill_dir", folder, "there is no such folder; make it first");
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    reject("spill_dir", folder, "this folder cannot be written");
  if (given.count("spill_dir") != 0 && arguments.memory_budget_bytes == 0) {
    throw ConfigError("--spill_dir is for plans that must fit a budget: add --memory_budget");
  }
}

// Insertions, deletions, substitutions and swaps of neighbours that make one word from the other.
std::size_t num_edits(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        edits[i][j] = i + j;
        continue;
      }
      const std::size_t substituted = edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, substituted});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  }
  return edits[a.size()][b.size()];
}

}  // namespace

const std::vector<ArgumentField>& argument_fields() {
  static const std::vector<ArgumentField> fields = make_fields();
  return fields;
}

std::string nearest_name(const std::string& word, const std::vector<std::string>& names) {
  std::string nearest;
  std::size_t fewest = static_cast<std::size_t>(-1);
  for (const std::string& name : names) {
    const std::size_t edits = num_edits(word, name);
    if (edits < fewest) {
      fewest = edits;
      nearest = name;
    }
  }
  return nearest;
}

void set_argument(TrainingArguments& arguments, const std::string& name, const std::string& value) {
  const auto& fields = argument_fields();
  const auto found = std::find_if(fields.begin(), fields.end(),
                                  [&](const ArgumentField& field) { return field.name == name; });
  if (found == fields.end()) {
    std::vector<std::string> names;
    names.reserve(fields.size());
    for (const ArgumentField& field : fields) names.push_back(field.name);
    throw ConfigError(
        fmt::format("unknown key '{}'; did you mean '{}'?", name, nearest_name(name, names)));
  }
  found->set(arguments, value);
}

std::vector<std::string> apply_config_file(TrainingArguments& arguments, const std::string& path,
                                           const std::set<std::string>& given_on_command_line) {
  std::ifstream file(path);
  if (!file) throw ConfigError(fmt::format("configuration file '{}' cannot be read", path));
  const nlohmann::json json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object())
    throw ConfigError(fmt::format("configuration file '{}' is not a JSON object", path));
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) {
    keys.push_back(key);
    if (value.is_object() || value.is_array() || value.is_null()) {
      throw ConfigError(fmt::format(
          "configuration file '{}': the value of '{}' must be a text, a number or true/false", path,
          key));
    }
    TrainingArguments scratch = arguments;
    TrainingArguments& target = given_on_command_line.count(key) != 0 ? scratch : arguments;
    set_argument(target, key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return keys;
}

void validate(const TrainingArguments& arguments, const std::set<std::string>& given) {
  if (given.count("per_device_train_batch_size") != 0)
    require_positive("per_device_train_batch_size", arguments.per_device_train_batch_size);
  require_not_negative("per_device_train_batch_size",
                       static_cast<double>(arguments.per_device_train_batch_size));
  require_not_negative("global_batch_size", static_cast<double>(arguments.global_batch_size));
  require_positive("logging_steps", arguments.logging_steps);
  require_positive("eval_steps", arguments.eval_steps);
  require_positive("nproc_per_node", arguments.nproc_per_node);
  require_positive("ddp_timeout", arguments.ddp_timeout);
  for (const auto& [name, value] :
       {std::pair<const char*, double>{"learning_rate", arguments.learning_rate},
        {"weight_decay", arguments.weight_decay},
        {"adam_epsilon", arguments.adam_epsilon},
        {"momentum", arguments.momentum},
        {"max_grad_norm", arguments.max_grad_norm},
        {"warmup_steps", static_cast<double>(arguments.warmup_steps)},
        {"scale_lr_by_batch", static_cast<double>(arguments.scale_lr_by_batch)},
        {"save_steps", static_cast<double>(arguments.save_steps)},
        {"save_total_limit", static_cast<double>(arguments.save_total_limit)},
        {"dataloader_num_workers", static_cast<double>(arguments.dataloader_num_workers)},
        {"num_threads", static_cast<double>(arguments.num_threads)},
        {"seed", static_cast<double>(arguments.seed)}}) {
    require_not_negative(name, value);
  }
  for (const auto& [name, value] :
       {std::pair<const char*, double>{"adam_beta1", arguments.adam_beta1},
        {"adam_beta2", arguments.adam_beta2}}) {
    if (value < 0 || value >= 1)
      reject(name, fmt::format("{:g}", value), "must be at least 0 and below 1");
  }
  if (arguments.max_steps < -1 || arguments.max_steps == 0)
    reject("max_steps", std::to_string(arguments.max_steps), "must be 1 or more, or -1");
  if (arguments.max_steps < 0 && !(arguments.num_train_epochs > 0)) {
    reject("num_train_epochs", fmt::format("{:g}", arguments.num_train_epochs), "must be above 0");
  }
  require_one_of("optim", arguments.optim, {"sgd", "adam", "adamw", "adafactor", "adamw_8bit"});
  require_one_of("lr_scheduler_type", arguments.lr_scheduler_type,
                 {"constant", "linear", "cosine"});
  require_one_of("eval_strategy", arguments.eval_strategy, {"no", "steps", "epoch"});
  require_one_of("report_to", arguments.report_to, {"none", "jsonl", "tensorboard"});
  validate_checkpointing(arguments);
  validate_spill_dir(arguments, given);
  validate_accumulation(arguments);

  validate_precision(arguments);
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
  if (arguments.output_dir.empty()) reject("output_dir", "", "must not be empty");
}

}  // namespace headroom
