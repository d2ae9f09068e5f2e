#include "commands.h"
#include "model/script_folder.h"
#include "report/json.h"
#include "saved_model.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/train/trainer.h>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>

namespace headroom {
namespace {

Json to_json(const EvalResults& results, std::int64_t peak_memory_bytes) {
  Json object = Json::object();
  object.set("eval_loss", results.loss);
  if (results.accuracy) object.set("eval_accuracy", *results.accuracy);
  if (results.f1) object.set("eval_f1", *results.f1);
  if (results.perplexity) object.set("perplexity", *results.perplexity);
  object.set("eval_samples", results.num_samples).set("peak_memory_bytes", peak_memory_bytes);
  return object;
}

// With the micro-batches of training as far as they fit the budget, and smaller ones otherwise.
EvalResults evaluate(TrainingArguments arguments, const Task& task) {
  std::int64_t& batch = arguments.per_device_train_batch_size;
  batch = std::max<std::int64_t>(1, arguments.fixed_micro_batch());
  arguments.global_batch_size = 0;
  while (true) {
    try {
      return Trainer(arguments, task.model.chain, task.train_data,
                     task.eval_data ? task.eval_data : task.train_data)
          .evaluate();
    } catch (const OutOfBudget& error) {
      if (batch == 1) {
        throw BudgetError(
            fmt::format("--memory_budget does not hold the evaluation of one sample: {}",
                        error.what_without_backtrace()));
      }
      batch /= 2;
    }
  }
}

}  // namespace

Command add_evaluate_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "evaluate",
      "loss, accuracy or perplexity of a saved model on the part of a dataset that "
      "training evaluates on, or on all of it where there is none");
  auto folder = std::make_shared<std::string>();
  command->add_option("DIR", *folder, "a folder with a saved model: --model_name_or_path");
  auto flags = std::make_shared<ArgumentFlags>(*command);
  return [folder, flags] {
    TrainingArguments arguments = flags->arguments();
    if (!folder->empty() || !requested_script(arguments))
      arguments.model_name_or_path = saved_model_folder(*folder, arguments.model_name_or_path);
    arguments.trust_model = true;  // nothing is trained
    const Task task = make_task(arguments, 1, /*is_trained=*/false);
    const EvalResults results = evaluate(task.arguments, task);
    const std::int64_t peak_bytes = MemoryMeter::instance().peak_bytes();
    if (arguments.json) {
      fmt::print("{}\n", to_json(results, peak_bytes).dump());
      return 0;
    }
    fmt::print("evaluation        {}\n", evaluation_text(results));
    fmt::print("samples           {}\n", results.num_samples);
    fmt::print("peak memory       {}\n", format_bytes(peak_bytes));
    return 0;
  };
}

}  // namespace headroom
