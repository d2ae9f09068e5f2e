#include "commands.h"

#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/train/trainer.h>
#include "core/figures.h"
#include "core/log.h"
#include "report/json.h"
#include "report/table.h"
#include "train/run_settings.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace headroom {
namespace {

struct Variant {
  std::string name;
  TrainingArguments arguments;
};

struct Outcome {
  std::string name;
  std::optional<TrainResults> results;  // nothing: it did not fit
  std::string problem;
};

// The same samples per update in every variant: what differs is how they are held in memory.
std::vector<Variant> make_variants(const TrainingArguments& given) {
  const std::int64_t global = RunSettings(given, 1).window_samples();
  const bool split_is_given =
      given.per_device_train_batch_size > 0 && given.per_device_train_batch_size < global;
  const std::int64_t micro =
      split_is_given ? given.per_device_train_batch_size : std::max<std::int64_t>(1, global / 4);
  const std::string policy =
      given.gradient_checkpointing.empty() || given.gradient_checkpointing == "optimal"
          ? "sqrt"
          : given.gradient_checkpointing;

  TrainingArguments plain = given;
  plain.global_batch_size = 0;
  plain.memory_budget_bytes = 0;
  plain.memory_budget_auto = false;
  plain.gradient_checkpointing.clear();
  plain.per_device_train_batch_size = global;
  plain.gradient_accumulation_steps = "1";

  TrainingArguments accumulation = plain;
  accumulation.global_batch_size = global;
  accumulation.per_device_train_batch_size = micro;
  TrainingArguments checkpointing = plain;
  checkpointing.gradient_checkpointing = policy;
  TrainingArguments both = accumulation;
  both.gradient_checkpointing = policy;

  std::vector<Variant> variants = {{"plain", plain},
                                   {"+ accumulation", accumulation},
                                   {"+ checkpointing", checkpointing},
                                   {"+ both", both}};
  if (given.has_budget()) {
    TrainingArguments planned = plain;
    planned.global_batch_size = global;
    planned.per_device_train_batch_size = 0;
    planned.memory_budget_bytes = given.memory_budget_bytes;
    planned.memory_budget_auto = given.memory_budget_auto;
    planned.gradient_checkpointing = "optimal";
    variants.push_back({"planned", planned});
  }
  return variants;
}

Outcome run(const Variant& variant) {
  Outcome outcome{variant.name, std::nullopt, ""};
  TrainingArguments arguments = variant.arguments;
  arguments.output_dir += "/" + variant.name.substr(variant.name.find_first_not_of("+ "));
  arguments.resume_from_checkpoint.clear();
  arguments.save_model = false;  // what is compared is how they train
  try {
    const Task task = make_task(arguments);
    Trainer trainer(task.arguments, task.model.chain, task.train_data, task.eval_data);
    outcome.results = trainer.train();
  } catch (const BudgetError& error) {
    outcome.problem = error.what();
  } catch (const c10::OutOfMemoryError& error) {
    outcome.problem = error.what_without_backtrace();
  }
  MemoryMeter::instance().set_cap(0);
  MemoryMeter::instance().trim();
  return outcome;
}

std::string ratio(double value, double base) {
  return base > 0 ? format_figure(value / base) + "x" : "-";
}

// Of the evaluation; a loss that counts no answers is one of tokens.
std::string quality(const std::optional<EvalResults>& eval) {
  if (!eval) return "-";
  return eval->accuracy ? fmt::format("{:.2f}%", 100 * *eval->accuracy)
                        : format_figure(std::exp(eval->loss));
}

Table make_table(const std::vector<Outcome>& outcomes) {
  const bool has_perplexity =
      std::any_of(outcomes.begin(), outcomes.end(), [](const Outcome& outcome) {
        return outcome.results && outcome.results->eval && !outcome.results->eval->accuracy;
      });
  Table table({"", "micro x steps", "time", "samples/s", "peak memory", "activations", "final loss",
               has_perplexity ? "perplexity" : "accuracy"});
  const auto base_outcome =
      std::find_if(outcomes.begin(), outcomes.end(),
                   [](const Outcome& outcome) { return outcome.results.has_value(); });
  for (const Outcome& outcome : outcomes) {
    if (!outcome.results) {
      table.add_row({outcome.name, "does not fit"});
      continue;
    }
    const TrainResults& r = *outcome.results;
    const TrainResults& base = *base_outcome->results;  // the first that fits
    const bool first = &outcome == &*base_outcome;
    const auto with_ratio = [&](const std::string& text, double value, double of) {
      return first ? text : text + " (" + ratio(value, of) + ")";
    };
    table.add_row(
        {outcome.name, fmt::format("{} x {}", r.micro_batch_size, r.gradient_accumulation_steps),
         with_ratio(format_figure(r.train_runtime) + " s", r.train_runtime, base.train_runtime),
         format_figure(r.train_samples_per_second),
         with_ratio(format_bytes(r.peak_memory_bytes), static_cast<double>(r.peak_memory_bytes),
                    static_cast<double>(base.peak_memory_bytes)),
         with_ratio(format_bytes(r.peak_activation_bytes),
                    static_cast<double>(r.peak_activation_bytes),
                    static_cast<double>(base.peak_activation_bytes)),
         format_loss(r.final_loss), quality(r.eval)});
  }
  return table;
}

}  // namespace

Command add_compare_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("compare",
                                         "train plain, with accumulation, with checkpointing, with "
                                         "both and planned; print before and after");
  auto flags = std::make_shared<ArgumentFlags>(*command);
  return [flags] {
    const TrainingArguments arguments = flags->arguments();
    if (arguments.nproc_per_node > 1)
      throw ConfigError(
          "compare runs in one process: leave --nproc_per_node out, or use headroom train");
    set_log_quiet(arguments.disable_tqdm || arguments.json);
    std::vector<Outcome> outcomes;
    for (const Variant& variant : make_variants(arguments)) {
      if (!arguments.json) fmt::print(stderr, "training: {}\n", variant.name);
      outcomes.push_back(run(variant));
    }
    if (arguments.json) {
      Json rows = Json::array();
      for (const Outcome& outcome : outcomes) {
        Json row = outcome.results ? to_json(*outcome.results) : Json::object();
        row.set("variant", outcome.name).set("fits", outcome.results.has_value());
        if (!outcome.results) row.set("problem", outcome.problem);
        rows.push(row);
      }
      fmt::print("{}\n", rows.dump());
    } else {
      fmt::print("{}", make_table(outcomes).to_text());
      for (const Outcome& outcome : outcomes) {
        if (!outcome.results) fmt::print("{}: {}\n", outcome.name, outcome.problem);
      }
    }
    return 0;
  };
}

}  // namespace headroom
