#include "commands.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/tokenizer.h>
#include <headroom/memory/meter.h>
#include "data/data_format.h"
#include "memory/shape_meter.h"
#include "model/requested_model.h"

#include <fmt/format.h>
#include <unistd.h>

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
void check_machine_holds_weights(const TrainingArguments& arguments) {
  const std::int64_t bytes = bytes_of_weights(arguments);
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

}  // namespace

Task make_task(const TrainingArguments& arguments, std::int64_t num_local_ranks) {
  configure_threads(static_cast<int>(arguments.num_threads), static_cast<int>(num_local_ranks));
  check_tokenizer(arguments);
  check_machine_holds_weights(arguments);
  MemoryMeter& meter = MemoryMeter::instance();
  meter.set_cap(arguments.memory_budget_bytes);
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  Task task;
  try {
    const OwnerScope owner(Owner::kWeights);
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
