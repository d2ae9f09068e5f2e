#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace headroom {

/// What the user asked for. Names and meaning are Hugging Face's where it has them; the rest is
/// ours.
struct TrainingArguments {
  // Model and data.
  std::string model = "mlp";
  std::string model_config;  ///< "k=v,..." sizes of the model
  /// A folder with config.json and weights to start from; empty: `model` with random weights.
  std::string model_name_or_path;
  std::string loss = "cross_entropy";  ///< of a TorchScript model: also mse, bce_with_logits, model
  bool trust_model = false;  ///< a TorchScript model is not compared with its chain before training
  std::string task;          ///< what is learned, one of task_names(); empty: what the model is for
  // What of the model is trained.
  std::int64_t lora_r = 0;  ///< rank of the adapters; 0: none
  double lora_alpha = 8.0;  ///< what adapters add is multiplied by alpha / r
  double lora_dropout = 0.0;
  std::string lora_target_modules;  ///< "a,b"; empty: what is usual for the model
  bool lora_merge = false;          ///< also save the model with its adapters merged into it
  std::string freeze;               ///< patterns of parameters that are not trained: "a*,b"

  std::string dataset = "fashion-mnist";
  std::string tokenizer;               ///< a SentencePiece model for text; empty: bytes
  std::string text_column = "text";    ///< of .csv, .tsv and .jsonl
  std::string label_column = "label";  ///< of the same
  std::string image_column = "image";  ///< of the same: the image that a text belongs to
  bool packing = false;                ///< several texts in one row of a causal language model
  bool group_by_length = false;        ///< texts of like length share a micro-batch
  bool shuffle = true;

  // Batch.
  std::int64_t per_device_train_batch_size =
      0;  ///< 0: not said, which means 8, or with global_batch_size the planner's choice
  std::string gradient_accumulation_steps =
      "1";                             ///< a number, or a schedule per epoch such as "0:8,4:2"
  std::int64_t global_batch_size = 0;  ///< 0: micro-batch x steps
  bool dataloader_drop_last = false;

  // Memory.
  std::int64_t memory_budget_bytes = 0;  ///< 0: no cap
  bool memory_budget_auto = false;  ///< the budget is what the machine can give when the run starts
  std::string spill_dir;  ///< where a plan may put activations for a while; empty: nowhere
  std::string gradient_checkpointing;  ///< empty: none; every, sqrt, log, segments=K, optimal
  bool recompute_check = false;
  bool fp16 = false;
  bool bf16 = false;
  std::string half_precision_backend =
      "auto";  ///< auto: what is faster here; autocast: compute in half precision; keep: keep in it

  // Optimization.
  std::string optim = "adamw";  ///< one of optimizer_names()
  double learning_rate = 5e-5;
  double weight_decay = 0.0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  double momentum = 0.0;
  double max_grad_norm = 1.0;  ///< 0: no clipping
  std::string lr_scheduler_type = "linear";
  std::int64_t warmup_steps = 0;
  std::int64_t scale_lr_by_batch =
      0;  ///< 0: off; otherwise the batch for which learning_rate was chosen

  // Length and order.
  double num_train_epochs = 3.0;
  std::int64_t max_steps = -1;  ///< positive: updates, whatever the epochs
  std::int64_t seed = 42;
  std::int64_t data_seed = -1;  ///< negative: seed
  std::int64_t dataloader_num_workers = 0;

  // What is seen and saved.
  std::string eval_strategy = "no";  ///< no, steps, epoch; a test set, where there is one, is
                                     ///< evaluated at the end in any case
  std::int64_t eval_steps = 500;
  bool load_best_model_at_end = false;  ///< the run ends with the weights of its best evaluation
  std::string metric_for_best_model = "loss";  ///< loss, accuracy, f1 or perplexity
  std::int64_t early_stopping_patience =
      0;  ///< so many evaluations in a row without a better one end the run; 0: none do
  std::int64_t logging_steps = 500;
  std::int64_t save_steps = 0;        ///< 0: no snapshots but at an interruption
  std::int64_t save_total_limit = 0;  ///< 0: keep all
  std::string output_dir = "outputs";
  bool save_model = true;              ///< the trained model, in output_dir at the end
  std::string resume_from_checkpoint;  ///< empty: start anew; a folder, or "last"
  std::string report_to = "jsonl";
  bool sample = false;  ///< print some generated text at the end, for language models
  bool error_on_nan =
      false;  ///< a gradient that is not finite ends the run instead of skipping the update

  // Ranks and machine.
  std::int64_t nproc_per_node = 1;  ///< ranks that the program starts on this machine
  std::int64_t ddp_timeout = 1800;  ///< seconds that a rank waits for another
  std::string device = "cpu";
  std::int64_t num_threads = 0;
  bool disable_tqdm = false;
  bool json = false;

  /// How the model was asked for, for messages: "--model gpt2".
  std::string model_flag() const {
    return model_name_or_path.empty() ? "--model " + model
                                      : "--model_name_or_path " + model_name_or_path;
  }
  bool has_budget() const { return memory_budget_auto || memory_budget_bytes > 0; }
  /// The micro-batch that the user fixed; 0 when the planner may choose.
  std::int64_t fixed_micro_batch() const {
    if (per_device_train_batch_size > 0) return per_device_train_batch_size;
    return global_batch_size > 0 ? 0 : 8;
  }
  std::uint64_t order_seed() const {
    return static_cast<std::uint64_t>(data_seed < 0 ? seed : data_seed);
  }
};

/// Sets one argument by name. Throws ConfigError, naming the nearest name, when there is none such.
void set_argument(TrainingArguments& arguments, const std::string& name, const std::string& value);

/// Reads a JSON object whose keys are flags. Keys in `given_on_command_line` are left alone. Throws
/// ConfigError on a file that is missing or no JSON object, on an unknown key (naming the nearest)
/// and on a value that does not fit. Returns the file's keys.
std::vector<std::string> apply_config_file(TrainingArguments& arguments, const std::string& path,
                                           const std::set<std::string>& given_on_command_line);

/// Checks every value against its range and every combination of values. `given` are the names that
/// the user set. Throws ConfigError with the value and what is allowed.
void validate(const TrainingArguments& arguments, const std::set<std::string>& given);

}  // namespace headroom
