#include "report/run_record.h"

#include <headroom/core/error.h>
#include "core/input_file.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <sstream>

namespace headroom {
namespace {

namespace fs = std::filesystem;
using Parsed = nlohmann::ordered_json;

constexpr std::int64_t kMostRunFileBytes = std::int64_t{1} << 30;
constexpr double kLargestInteger = 1e18;  // of a run: sums of a few are within 64 bits

std::string read_text(const fs::path& path) {
  if (!path_exists(path))
    throw DataError(
        fmt::format("'{}' cannot be read: give the --output_dir of a run that has ended",
                    shown_path(path.string())));
  return InputFile(path).read_all(kMostRunFileBytes);
}

// One file of a run. Whatever is not as a run writes it is a DataError that names the file.
class RunFile {
 public:
  RunFile(std::string where, const std::string& text) : where_(std::move(where)) {
    if (!json_depth_is_allowed(text)) fail("is nested too deep");
    json_ = Parsed::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json_.is_object()) fail("is not a JSON object");
  }
  const Parsed& json() const { return json_; }
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(fmt::format("{} {}: it is damaged or not of a run", where_, what));
  }

  const Parsed& at(const Parsed& object, const char* key) const {
    if (!object.is_object() || !object.contains(key)) fail(fmt::format("has no '{}'", key));
    return object.at(key);
  }
  std::int64_t integer(const Parsed& object, const char* key) const {
    const Parsed& value = at(object, key);
    if (!value.is_number_integer()) fail(fmt::format("has no whole number in '{}'", key));
    if (std::abs(value.get<double>()) > kLargestInteger)
      fail(fmt::format("has {} in '{}'", value.dump(), key));
    return value.get<std::int64_t>();
  }
  std::int64_t integer_or_zero(const Parsed& object, const char* key) const {
    return object.contains(key) ? integer(object, key) : 0;
  }
  // null is how a number that is not finite is written.
  double number(const Parsed& object, const char* key) const {
    const Parsed& value = at(object, key);
    if (value.is_null()) return std::nan("");
    if (!value.is_number()) fail(fmt::format("has no number in '{}'", key));
    return value.get<double>();
  }
  std::string text(const Parsed& object, const char* key) const {
    const Parsed& value = at(object, key);
    if (!value.is_string()) fail(fmt::format("has no text in '{}'", key));
    return value.get<std::string>();
  }
  const Parsed& array(const char* key) const {
    const Parsed& value = at(json_, key);
    if (!value.is_array()) fail(fmt::format("has no list in '{}'", key));
    return value;
  }
  std::map<std::string, std::int64_t> sizes(const Parsed& object, const char* key) const {
    std::map<std::string, std::int64_t> result;
    const Parsed& sizes = at(object, key);
    if (!sizes.is_object()) fail(fmt::format("has no sizes in '{}'", key));
    for (const auto& [name, bytes] : sizes.items()) result[name] = integer(sizes, name.c_str());
    return result;
  }

 private:
  std::string where_;
  Parsed json_;
};

RunFile open_run_file(const fs::path& path) {
  return RunFile(fmt::format("'{}'", shown_path(path.string())), read_text(path));
}

TrainResults results_of(const RunFile& file) {
  const Parsed& json = file.json();
  TrainResults results;
  results.train_runtime = file.number(json, "train_runtime");
  results.train_samples_per_second = file.number(json, "train_samples_per_second");
  results.train_steps_per_second = file.number(json, "train_steps_per_second");
  results.train_loss = file.number(json, "train_loss");
  results.final_loss = file.number(json, "final_loss");
  results.epoch = file.number(json, "epoch");
  results.global_step = file.integer(json, "global_step");
  if (json.contains("eval_loss")) {
    results.eval.emplace();
    results.eval->loss = file.number(json, "eval_loss");
    if (json.contains("eval_accuracy")) results.eval->accuracy = file.number(json, "eval_accuracy");
  }
  results.peak_memory_bytes = file.integer(json, "peak_memory_bytes");
  results.peak_activation_bytes = file.integer(json, "peak_activation_bytes");
  results.peak_rss_bytes = file.integer(json, "peak_rss_bytes");
  results.memory_budget_bytes = file.integer(json, "memory_budget_bytes");
  results.predicted_peak_bytes = file.integer(json, "predicted_peak_bytes");
  results.predicted_step_seconds = file.number(json, "predicted_step_seconds");
  results.measured_step_seconds = file.number(json, "measured_step_seconds");
  results.micro_batch_size = file.integer(json, "micro_batch_size");
  results.gradient_accumulation_steps = file.integer(json, "gradient_accumulation_steps");
  results.world_size = file.integer(json, "world_size");
  results.recomputed_forward_fraction = file.number(json, "recomputed_forward_fraction");
  results.peak_bytes_by_owner = file.sizes(json, "peak_bytes_by_owner");
  results.num_skipped_updates = file.integer(json, "num_skipped_updates");
  results.num_recoveries = file.integer_or_zero(json, "num_recoveries");
  results.num_parameters = file.integer(json, "num_parameters");
  results.weights_sha256 = file.text(json, "weights_sha256");
  return results;
}

void read_plan(const RunFile& file, RunRecord& run) {
  const Parsed& json = file.json();
  if (!json.contains("policy")) return;  // nothing was predicted
  run.policy = file.text(json, "policy");
  for (const Parsed& stage : file.array("stages")) {
    run.stages.push_back({file.text(stage, "name"), file.text(stage, "decision"),
                          file.integer(stage, "kept_bytes"),
                          1e-9 * static_cast<double>(file.integer(stage, "extra_ns"))});
  }
  if (json.contains("paging")) {
    run.paged_bytes_read = file.integer(json["paging"], "bytes_read_per_update");
    run.paged_bytes_written = file.integer(json["paging"], "bytes_written_per_update");
  }
  if (!json.contains("timeline")) return;
  const Parsed& operations = file.array("operations");
  // The plan counts what changes; what stays (weights and so on) is the difference to what was
  // measured after the operation before.
  std::int64_t live_before = -1, planned_before = 0;
  for (const Parsed& point : file.array("timeline")) {
    const std::int64_t index = file.integer(point, "operation");
    if (index < 0 || index >= static_cast<std::int64_t>(operations.size()))
      file.fail(fmt::format("has no operation {}", index));
    const Parsed& operation = operations[static_cast<std::size_t>(index)];
    const std::int64_t stage = file.integer(operation, "stage"),
                       live = file.integer(point, "live_bytes");
    const std::int64_t planned = file.integer(operation, "live_bytes");
    if (stage < 1 || stage > static_cast<std::int64_t>(run.stages.size()))
      file.fail(fmt::format("has no stage {}", stage));
    if (live_before < 0) live_before = live - planned;
    RunRecord::Moment moment;
    moment.operation = fmt::format("{} of {}", file.text(operation, "op"),
                                   run.stages[static_cast<std::size_t>(stage - 1)].name);
    moment.bytes_by_owner = file.sizes(point, "by_owner");
    moment.peak_bytes =
        std::max(live, live_before + file.integer(operation, "peak_bytes") - planned_before);
    run.timeline.push_back(std::move(moment));
    live_before = live;
    planned_before = planned;
  }
}

void read_metrics(const fs::path& path, RunRecord& run) {
  std::istringstream lines(read_text(path));
  std::int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    const RunFile entry(fmt::format("line {} of '{}'", ++number, shown_path(path.string())), line);
    const Parsed& json = entry.json();
    const std::int64_t step = entry.integer(json, "step");
    if (json.contains("loss"))
      run.updates.push_back(
          {step, entry.number(json, "loss"), entry.number(json, "learning_rate")});
    if (json.contains("eval_loss"))
      run.evaluations.push_back({step, entry.number(json, "eval_loss")});
  }
}

}  // namespace

RunRecord read_run(const std::string& folder_text) {
  const fs::path folder = folder_text;
  if (!is_folder(folder_text))
    throw DataError(fmt::format("'{}' is not a folder: give the --output_dir of a run",
                                shown_path(folder_text)));
  RunRecord run;
  run.name = fs::canonical(folder).filename().string();
  run.results = results_of(open_run_file(folder / "train_results.json"));
  read_plan(open_run_file(folder / "plan.json"), run);
  if (path_exists(folder / "metrics.jsonl")) read_metrics(folder / "metrics.jsonl", run);
  if (path_exists(folder / "training_args.json")) {
    const RunFile arguments = open_run_file(folder / "training_args.json");
    for (const auto& [name, value] : arguments.json().items()) {
      run.settings.emplace_back(name, value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  return run;
}

}  // namespace headroom
