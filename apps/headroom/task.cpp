#include "commands.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/tokenizer.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include "data/data_format.h"
#include "memory/shape_meter.h"
#include "memory/spill_store.h"
#include "model/config_text.h"
#include "model/requested_model.h"
#include "model/script_folder.h"

#include <fmt/format.h>
#include <unistd.h>

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

std::int64_t bytes_of_weights(const TrainingArguments& arguments) {
  const std::int64_t before = ShapeMeter::instance().live_bytes();
  const ShapeOnlyScope scope;
  const ZooModel model = make_requested_model(arguments);
  return ShapeMeter::instance().live_bytes() - before;
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

OpenedData open_data_for(const ModelInput& input, const TrainingArguments& arguments) {
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
  return open_data(request);
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

Task make_script_task(const ScriptRequest& request, const TrainingArguments& arguments) {
  Task task;
  task.model.input = script_input(request.sizes);
  OpenedData data = open_data_for(task.model.input, arguments);
  // A batch norm needs more than one sample.
  const std::vector<std::int64_t> first =
      data.train->size() > 1 ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{0};
  const MicroBatch samples = data.train->load(first);
  try {
    const OwnerScope owner(Owner::kWeights);
    task.model.chain = Chain::from_script(request.path, parse_loss(request.loss), samples);
    task.model.chain.set_format(script_format(request));
  } catch (const OutOfBudget& error) {
    throw BudgetError(
        fmt::format("--memory_budget does not even hold the weights of {} and what "
                    "it computes of {} samples: {}",
                    request.path, samples.num_samples, error.what_without_backtrace()));
  }
  if (!arguments.trust_model) check_script(task.model.chain, samples);
  choose_trained_parameters(task.model.chain, arguments);
  task.train_data = std::move(data.train);
  task.eval_data = std::move(data.eval);
  task.tokenizer = std::move(data.tokenizer);
  return task;
}

}  // namespace

std::optional<Task> make_uncapped_script_task(const TrainingArguments& arguments) {
  const std::optional<ScriptRequest> script = requested_script(arguments);
  if (!script) return std::nullopt;
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  return make_script_task(*script, arguments);
}

Task make_task(const TrainingArguments& arguments, std::int64_t num_local_ranks) {
  configure_threads(static_cast<int>(arguments.num_threads), static_cast<int>(num_local_ranks));
  check_tokenizer(arguments);
  const std::optional<ScriptRequest> script = requested_script(arguments);
  const std::int64_t weights = script ? 0 : bytes_of_weights(arguments);
  const bool is_paged = arguments.memory_budget_bytes > 0 && !arguments.spill_dir.empty() &&
                        num_local_ranks == 1 && weights > arguments.memory_budget_bytes;
  if (!is_paged) check_machine_holds_weights(arguments, weights);
  MemoryMeter& meter = MemoryMeter::instance();
  meter.set_cap(arguments.memory_budget_bytes);
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  if (script) return make_script_task(*script, arguments);
  Task task;
  try {
    const OwnerScope owner(Owner::kWeights);
    // Weights that the budget does not hold are made where they are paged.
    std::optional<MappedAllocationScope> on_disk;
    if (is_paged) on_disk.emplace(std::make_shared<SpillStore>(arguments.spill_dir));
    task.model = load_requested_model(arguments);
  } catch (const OutOfBudget& error) {
    throw BudgetError(fmt::format("--memory_budget does not even hold the weights of {}: {}",
                                  arguments.model_flag(), error.what_without_backtrace()));
  }
  OpenedData data = open_data_for(task.model.input, arguments);
  task.train_data = std::move(data.train);
  task.eval_data = std::move(data.eval);
  task.tokenizer = std::move(data.tokenizer);
  return task;
}

}  // namespace headroom
