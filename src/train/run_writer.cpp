#include "train/run_writer.h"
#include "core/output_file.h"

#include <headroom/core/error.h>
#include <headroom/model/pretrained.h>
#include "config/argument_fields.h"
#include "core/log.h"
#include "report/json.h"
#include "report/trainer_state.h"

#include <fmt/format.h>

#include <filesystem>

namespace headroom {
namespace {

void make_output_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw ConfigError(
        fmt::format("--output_dir '{}' cannot be made: {}", shown_path(folder), error.message()));
  // Fails now rather than after hours of training.
  const std::string probe = folder + "/.write_probe";
  write_file_atomically(probe, "");
  std::filesystem::remove(probe, error);
}

// What differs from the defaults, as a file for --config that makes the run again.
Json to_json(const TrainingArguments& arguments) {
  const TrainingArguments defaults;
  Json json = Json::object();
  for (const ArgumentField& field : argument_fields()) {
    if (field.get(arguments) != field.get(defaults)) json.set(field.name, field.get(arguments));
  }
  return json;
}

}  // namespace

RunWriter::RunWriter(const TrainingArguments& arguments, bool is_silent)
    : arguments_(arguments), is_silent_(is_silent) {
  if (is_silent) return;
  make_output_folder(arguments.output_dir);
  lock_ = std::make_unique<RunLock>(arguments.output_dir);
}

void RunWriter::tell(const std::string& message) const {
  if (!is_silent_ && !message.empty()) log_info(message);
}

void RunWriter::warn(const std::string& message) const {
  if (!is_silent_) log_warning(message);
}

void RunWriter::write(const std::string& name, const Json& json) const {
  if (!is_silent_) write_file_atomically(arguments_.output_dir + "/" + name, json.dump() + "\n");
}

void RunWriter::write(const TrainResults& results) const {
  write("train_results.json", to_json(results));
  if (is_silent_ || results.model_sha256.empty()) return;
  const std::string folder = arguments_.output_dir + "/";
  write_file_atomically(folder + "trainer_state.json",
                        trainer_state(arguments_, results, total_steps_, folder + "metrics.jsonl"));
}

void RunWriter::save_model(const Chain& chain, TrainResults& results) const {
  if (is_silent_ || !arguments_.save_model) return;
  results.model_sha256 = save_pretrained(chain, arguments_.output_dir).sha256;
  write(results);
}

void RunWriter::describe(const RunPlan& plan) {
  if (is_silent_) return;
  write("training_args.json", to_json(arguments_));
  write("plan.json", to_json(plan));
  if (plan.is_predicted && !arguments_.json && !arguments_.disable_tqdm) tell(to_text(plan));
}

void RunWriter::add(const PlanNews& news, const RunPlan& plan) {
  if (is_silent_) return;
  if (!news.message.empty()) news.is_warning ? warn(news.message) : tell(news.message);
  if (!news.name.empty()) write(fmt::format("plan-{}.json", news.name), to_json(plan));
}

void RunWriter::start(std::int64_t first_step, std::int64_t total_steps) {
  total_steps_ = total_steps;
  log_ = std::make_unique<RunLog>(arguments_, first_step, total_steps, is_silent_);
  timeline_ = {};
}

void RunWriter::start_update(const RunPlan& plan) {
  log_->start_update();
  if (plan.is_predicted && log_->num_samples() == 0) timeline_.start();
}

void RunWriter::on_operation(std::size_t operation, bool has_planned_size) {
  timeline_.record(operation, has_planned_size);
}

void RunWriter::on_undo() {
  if (timeline_.is_recording()) timeline_.start();  // the step is made again, by another plan
}

void RunWriter::add(const Update& update, const TrainingPosition& position, double epochs,
                    const RunPlan& plan) {
  if (timeline_.is_recording()) {
    timeline_.finish();
    if (!is_silent_) {
      write("plan.json", to_json(plan).set("timeline", timeline_.points()));
      write("trace.json",
            timeline_.trace(plan, transfers_ ? transfers_() : std::vector<TransferRecord>{}));
    }
  }
  log_->end_update(update, position, epochs);
}

void RunWriter::add(const EvalResults& eval, std::int64_t step, double epochs) {
  log_->add_evaluation(eval, step, epochs);
}

void RunWriter::finish() {
  if (log_) log_->finish();
}

}  // namespace headroom
