#include "commands.h"
#include "config/task.h"
#include "core/figures.h"
#include "core/input_file.h"
#include "core/output_file.h"
#include "launch.h"
#include "model/script_folder.h"
#include "report/json.h"
#include "saved_model.h"
#include "stop_signals.h"

#include <headroom/comm/communicator.h>
#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include <headroom/model/generate.h>
#include <headroom/model/pretrained.h>
#include <headroom/train/trainer.h>
#include "core/log.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <chrono>

namespace headroom {
namespace {

void print_results(const TrainResults& results) {
  fmt::print("updates           {} ({:.2f} epochs) in {} s: {} samples/s\n", results.global_step,
             results.epoch, format_figure(results.train_runtime),
             format_figure(results.train_samples_per_second));
  fmt::print("micro-batches     {}{} x {} samples\n",
             results.world_size == 1 ? "" : fmt::format("{} ranks x ", results.world_size),
             results.gradient_accumulation_steps, results.micro_batch_size);
  fmt::print("loss              {} (last global batch), {} (mean)\n",
             format_loss(results.final_loss), format_loss(results.train_loss));
  if (results.eval) fmt::print("evaluation        {}\n", evaluation_text(*results.eval));
  fmt::print("peak memory       {} (activations {}), resident {}\n",
             format_bytes(results.peak_memory_bytes), format_bytes(results.peak_activation_bytes),
             format_bytes(results.peak_rss_bytes));
  if (results.predicted_peak_bytes > 0) {
    fmt::print("predicted         {} peak, {} s per update; measured {} s\n",
               format_bytes(results.predicted_peak_bytes),
               format_figure(results.predicted_step_seconds),
               format_figure(results.measured_step_seconds));
  }
  if (results.num_skipped_updates > 0)
    fmt::print("skipped updates   {}\n", results.num_skipped_updates);
}

void print_sample(const Task& task, const TrainingArguments& arguments) {
  GenerateOptions options;
  options.num_tokens = 300;
  options.temperature = 0.8;
  options.seed = static_cast<std::uint64_t>(arguments.seed);
  const std::vector<std::int64_t> tokens =
      generate(task.model.chain, task.tokenizer->encode("\n"), options);
  fmt::print("sample:\n{}\n", task.tokenizer->decode(tokens));
}

void save_beside_model(const Task& task, const std::string& folder) {
  if (task.tokenizer) task.tokenizer->save(folder);
  for (const auto& [name, contents] : task.files)
    write_file_atomically(folder + "/" + name, contents);
}

// Ranks that the user started are as many as the user says.
void check_ranks(const RankEnvironment& ranks, const TrainingArguments& arguments) {
  if (arguments.nproc_per_node == 1 || arguments.nproc_per_node == ranks.local_size) return;
  throw ConfigError(
      fmt::format("--nproc_per_node {} contradicts the environment, where this is one of {} ranks "
                  "on this machine: leave it out",
                  arguments.nproc_per_node, ranks.local_size));
}

// The adapters as they were saved, merged into their base.
void save_merged(const TrainingArguments& arguments, const Task& task) {
  MemoryMeter::instance().set_cap(0);  // training is over, and the model is loaded once more
  const std::string folder = arguments.output_dir + "/merged";
  TrainingArguments saved = arguments;
  saved.model_name_or_path = arguments.output_dir;
  const std::optional<ScriptRequest> script = requested_script(saved);
  save_pretrained(script ? load_script(*script, first_samples(*task.train_data))
                         : load_pretrained(arguments.output_dir).chain,
                  folder);
  save_beside_model(task, folder);
}

// A folder is a whole model or adapters for one.
void check_adapter_folder(const TrainingArguments& arguments) {
  if (arguments.lora_r == 0 || !path_exists(arguments.output_dir + "/config.json")) return;
  throw ConfigError(
      fmt::format("--output_dir '{}' holds a whole model, and adapters would be taken for a part "
                  "of it: give them a folder of their own",
                  arguments.output_dir));
}

// A TorchScript model is the user's program: what its operators throw is no defect of ours.
TrainResults train_checked(Trainer& trainer, const Task& task) {
  try {
    return trainer.train();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    if (!task.model.chain.whole()) throw;
    throw ConfigError(fmt::format("the model cannot be trained, because an operation fails: {}",
                                  error.what_without_backtrace()));
  }
}

int train_rank(const TrainingArguments& given, std::int64_t num_local_ranks,
               const std::shared_ptr<Communicator>& comm) {
  check_adapter_folder(given);
  const Task task = make_task(given, num_local_ranks);
  const TrainingArguments& arguments = task.arguments;
  if (arguments.sample && (!task.tokenizer || task_of(task.model.input) != TaskKind::kCausalLm ||
                           task.model.chain.whole())) {
    throw ConfigError(
        "--sample needs a model that continues text, and text to train on: --model gpt with "
        "--dataset TEXT");
  }
  if (comm->is_first()) {
    for (const std::string& warning : runtime_info().warnings) log_warning(warning);
  }
  stop_at_signals();
  Trainer trainer(arguments, task.model.chain, task.train_data, task.eval_data, comm);
  const TrainResults results = train_checked(trainer, task);
  const auto exit_code =
      static_cast<int>(trainer.was_interrupted() ? ExitCode::kInterrupted : ExitCode::kDone);
  if (!comm->is_first()) return exit_code;
  if (arguments.save_model) save_beside_model(task, arguments.output_dir);
  if (arguments.save_model && arguments.lora_merge) save_merged(arguments, task);
  if (arguments.json) {
    fmt::print("{}\n", to_json(results).dump());
  } else {
    print_results(results);
  }
  if (arguments.sample && !trainer.was_interrupted()) print_sample(task, arguments);
  return exit_code;
}

}  // namespace

Command add_train_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "train a model");
  auto flags = std::make_shared<ArgumentFlags>(*command);
  return [flags] {
    const TrainingArguments arguments = flags->arguments();
    const RankEnvironment ranks = RankEnvironment::read();
    if (!ranks.is_given && arguments.nproc_per_node > 1)
      return launch_ranks(arguments.nproc_per_node);
    check_ranks(ranks, arguments);
    end_at_signals(ranks.rank == 0);
    // First of all, so that a rank that fails from here on is noticed by the others.
    const std::shared_ptr<Communicator> comm =
        join_ranks(ranks, std::chrono::seconds(arguments.ddp_timeout));
    try {
      return train_rank(arguments, ranks.local_size, comm);
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      if (comm->is_first()) throw;
      throw Error(error.exit_code(), fmt::format("rank {}: {}", comm->rank(), error.what()));
    }
  };
}

}  // namespace headroom
