#include "commands.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/tokenizer.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/safetensors.h>
#include "config/task.h"
#include "data/data_format.h"
#include "memory/shape_meter.h"
#include "memory/spill_store.h"
#include "model/config_text.h"
#include "model/published.h"
#include "model/requested_model.h"
#include "model/script_folder.h"
#include "train/auto_budget.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>

namespace headroom {
namespace {

// A tokenizer turns text into tokens: other data has no use for one.
void check_tokenizer(const TrainingArguments& arguments) {
  if (arguments.tokenizer.empty()) return;
  const DataFormat& format = format_of(arguments.dataset);
  if (format.takes_tokenizer) return;
  throw ConfigError(
      fmt::format("--tokenizer is for text, but --dataset '{}' {}: leave --tokenizer out, or give "
                  "a text file",
                  arguments.dataset, format.what));
}

// Whether the folder's model classifies texts as it is.
bool is_saved_classifier(const std::string& folder) {
  if (folder.empty()) return false;
  const ShapeOnlyScope scope;
  return task_of(make_model_of(folder).input) == TaskKind::kTextClassification;
}

// What the task wants the model to end in. The number of classes is not known before the data is.
ModelHead asked_head(const TrainingArguments& arguments) {
  constexpr std::int64_t kAnyNumber = 2;
  if (arguments.task.empty()) return {};
  switch (parse_task(arguments.task)) {
    case TaskKind::kTextClassification:
      if (is_saved_classifier(arguments.model_name_or_path)) return {};
      return {ModelHead::Kind::kClassifier, kAnyNumber};
    case TaskKind::kCausalLm:
    case TaskKind::kMaskedLm:
      return {ModelHead::Kind::kLanguageModel, 0};
    default:
      return {};
  }
}

void check_task(const TrainingArguments& arguments, const ModelInput& input) {
  if (arguments.task.empty() || parse_task(arguments.task) == task_of(input)) return;
  throw ConfigError(fmt::format("--task {}, but {} is for {}", arguments.task,
                                arguments.model_flag(), task_name(task_of(input))));
}

// What the model reads, and the bytes of its weights: by its sizes alone.
std::pair<ModelInput, std::int64_t> check_model(const TrainingArguments& arguments) {
  const std::int64_t before = ShapeMeter::instance().live_bytes();
  const ShapeOnlyScope scope;
  const ZooModel model = make_requested_model(arguments, asked_head(arguments));
  const std::int64_t bytes = ShapeMeter::instance().live_bytes() - before;
  check_task(arguments, model.input);
  return {model.input, bytes};
}

// Refuses a model that this machine cannot hold before anything of it is allocated: Linux would
// grant the memory and run out of it later.
void check_machine_holds_weights(const TrainingArguments& arguments, std::int64_t bytes) {
  const std::int64_t machine_bytes = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  if (bytes <= machine_bytes) return;
  throw ConfigError(
      fmt::format("the weights of {} take {}, but this machine has {} of "
                  "memory: choose a smaller model or smaller sizes in --model_config",
                  arguments.model_flag(), format_bytes(bytes), format_bytes(machine_bytes)));
}

std::vector<StoredArray> list_safetensors(const std::string& path) {
  std::vector<StoredArray> arrays;
  const SafetensorsReader reader(path);
  for (const SafetensorsEntry& entry : reader.entries())
    arrays.push_back({path, entry.name, entry.dtype, entry.shape, entry.begin});
  return arrays;
}

OpenedData open_data_for(const ModelInput& input, const TrainingArguments& arguments,
                         bool is_trained) {
  const bool is_script = requested_script(arguments).has_value();
  if (arguments.packing && (is_script || task_of(input) != TaskKind::kCausalLm)) {
    throw ConfigError(fmt::format(
        "--packing is for causal language models of the zoo, but {} is {}", arguments.model_flag(),
        is_script ? "a TorchScript model" : fmt::format("for {}", task_name(task_of(input)))));
  }
  DataRequest request;
  request.dataset = arguments.dataset;
  const std::string& folder = arguments.model_name_or_path;
  request.tokenizer = arguments.tokenizer;
  if (request.tokenizer.empty() && !folder.empty() && has_tokenizer(folder))
    request.tokenizer = folder;
  request.model = folder.empty() ? arguments.model : folder;
  request.input = input;
  request.seed = static_cast<std::uint64_t>(arguments.seed);
  request.order_seed = arguments.order_seed();
  request.model_folder = folder;
  if (!folder.empty()) request.labels = label_names_of(folder);
  request.is_trained = is_trained;
  request.takes_any_shape = is_script;
  request.text_column = arguments.text_column;
  request.label_column = arguments.label_column;
  request.image_column = arguments.image_column;
  request.packs = arguments.packing;
  request.num_workers = arguments.dataloader_num_workers;
  request.list_arrays = list_safetensors;
  return open_data(request);
}

void take_data(OpenedData data, Task& task) {
  task.train_data = std::move(data.train);
  task.eval_data = std::move(data.eval);
  task.tokenizer = std::move(data.tokenizer);
  task.files = std::move(data.files);
}

// The head for the classes of the data, where it names them.
ModelHead head_for(const OpenedData& data, const TrainingArguments& arguments, bool is_trained) {
  if (data.labels.empty() || !is_trained) return asked_head(arguments);
  return {ModelHead::Kind::kClassifier, static_cast<std::int64_t>(data.labels.size())};
}

void name_classes(const OpenedData& data, ZooModel& model) {
  const auto num_labels = static_cast<std::int64_t>(data.labels.size());
  if (num_labels == 0) return;
  if (num_labels > model.input.num_classes) {
    throw ConfigError(
        fmt::format("the data has {} classes, but the model has {}: leave num_labels and classes "
                    "out of --model_config, or start from a model with more",
                    num_labels, model.input.num_classes));
  }
  LabelNames names = data.labels;
  for (std::int64_t i = num_labels; i < model.input.num_classes; ++i)
    names.push_back(fmt::format("LABEL_{}", i));
  set_label_names(model.chain, names, data.padding_token);
}

// A TorchScript file does not say what it reads: --model_config says what the data is to be.
ModelInput script_input(const std::string& sizes) {
  ModelInput input;
  const ConfigSetters setters{
      {"channels", set_side(input.channels)}, {"rows", set_side(input.rows)},
      {"columns", set_side(input.columns)},   {"classes", set_size(input.num_classes)},
      {"length", set_size(input.length)},     {"vocab_size", set_size(input.vocabulary)}};
  read_config("a TorchScript model", sizes, setters);
  if ((input.length > 0) != (input.vocabulary > 0)) {
    throw ConfigError(
        "--model_config: a TorchScript model that reads tokens needs both length and vocab_size");
  }
  if (input.length > 0) input.kind = ModelInput::Kind::kTokens;
  return input;
}

void check_script(const Chain& chain, const MicroBatch& samples) {
  try {
    check_whole_model(chain, samples);
  } catch (const c10::OutOfMemoryError&) {
    release_failed_backward();
    throw BudgetError(fmt::format(
        "--memory_budget does not hold the whole model at {} samples, with which its stages are "
        "compared before the first update: raise it, or skip that with --trust_model",
        samples.num_samples));
  }
}

// What a step takes, with the gradients of vectors alone: matrices that adapters freeze have none
// in training either, and a budget for adapters need not hold them.
class VectorsTrainedScope {
 public:
  explicit VectorsTrainedScope(const Chain& chain) {
    const std::vector<at::Tensor> parameters = chain.parameters();
    const auto is_vector = [](const at::Tensor& parameter) { return parameter.dim() < 2; };
    if (std::none_of(parameters.begin(), parameters.end(), is_vector)) return;
    for (const at::Tensor& parameter : parameters) {
      if (!is_vector(parameter)) matrices_.push_back(parameter);
    }
    for (const at::Tensor& matrix : matrices_) matrix.requires_grad_(false);
  }
  ~VectorsTrainedScope() {
    for (const at::Tensor& matrix : matrices_) matrix.requires_grad_(true);
  }
  VectorsTrainedScope(const VectorsTrainedScope&) = delete;
  VectorsTrainedScope& operator=(const VectorsTrainedScope&) = delete;

 private:
  std::vector<at::Tensor> matrices_;
};

// The model as it is trained, of which each step was compared with the model as it was written.
void prepare_script(Chain& chain, const TrainingArguments& arguments, const MicroBatch& samples) {
  if (!arguments.trust_model) {
    std::optional<VectorsTrainedScope> vectors;
    if (arguments.lora_r > 0) vectors.emplace(chain);
    check_script(chain, samples);
  }
  {
    const OwnerScope owner(Owner::kWeights);
    choose_trained_parameters(chain, arguments, {}, samples);
  }
  if (!arguments.trust_model && arguments.lora_r > 0) check_script(chain, samples);
}

Task make_script_task(const ScriptRequest& request, const TrainingArguments& arguments,
                      bool is_trained = true) {
  Task task;
  task.model.input = script_input(request.sizes);
  check_task(arguments, task.model.input);
  OpenedData data = open_data_for(task.model.input, arguments, is_trained);
  const MicroBatch samples = first_samples(*data.train);
  try {
    {
      const OwnerScope owner(Owner::kWeights);
      task.model.chain = load_script(request, samples);
    }
    prepare_script(task.model.chain, arguments, samples);
  } catch (const OutOfBudget& error) {
    throw BudgetError(
        fmt::format("--memory_budget does not even hold the weights of {} and what "
                    "it computes of {} samples: {}",
                    request.path, samples.num_samples, error.what_without_backtrace()));
  }
  task.arguments = arguments;
  take_data(std::move(data), task);
  return task;
}

}  // namespace

MicroBatch first_samples(const Dataset& data) {
  // A batch norm needs more than one.
  return data.load(data.size() > 1 ? std::vector<std::int64_t>{0, 1}
                                   : std::vector<std::int64_t>{0});
}

std::optional<Task> make_uncapped_script_task(const TrainingArguments& arguments) {
  const std::optional<ScriptRequest> script = requested_script(arguments);
  if (!script) return std::nullopt;
  MemoryMeter::instance().set_cap(0);  // counts from now on, also what reading the file leaves
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  return make_script_task(*script, arguments);
}

Task make_task(const TrainingArguments& given, std::int64_t num_local_ranks, bool is_trained) {
  configure_threads(static_cast<int>(given.num_threads), static_cast<int>(num_local_ranks));
  check_tokenizer(given);
  MemoryMeter& meter = MemoryMeter::instance();
  TrainingArguments arguments = given;
  if (const std::optional<ScriptRequest> script = requested_script(arguments)) {
    settle_budget(arguments, num_local_ranks);
    meter.set_cap(arguments.memory_budget_bytes);
    seed_everything(static_cast<std::uint64_t>(arguments.seed));
    return make_script_task(*script, arguments, is_trained);
  }
  // The data first: its classes decide the model's head, and what it takes is not left for tensors.
  const auto [input, weights_bytes] = check_model(arguments);
  OpenedData data = open_data_for(input, arguments, is_trained);
  settle_budget(arguments, num_local_ranks);
  const bool is_paged = arguments.memory_budget_bytes > 0 && !arguments.spill_dir.empty() &&
                        num_local_ranks == 1 && weights_bytes > arguments.memory_budget_bytes;
  if (!is_paged) check_machine_holds_weights(arguments, weights_bytes);
  meter.set_cap(arguments.memory_budget_bytes);
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  Task task;
  task.arguments = arguments;
  try {
    const OwnerScope owner(Owner::kWeights);
    // Weights that the budget does not hold are made where they are paged.
    std::optional<MappedAllocationScope> on_disk;
    if (is_paged) on_disk.emplace(std::make_shared<SpillStore>(arguments.spill_dir));
    task.model = load_requested_model(arguments, head_for(data, arguments, is_trained));
  } catch (const OutOfBudget& error) {
    throw BudgetError(fmt::format("--memory_budget does not even hold the weights of {}: {}",
                                  arguments.model_flag(), error.what_without_backtrace()));
  }
  name_classes(data, task.model);
  take_data(std::move(data), task);
  return task;
}

}  // namespace headroom
