#include "train/run_log.h"
#include "report/json.h"

#include "core/figures.h"
#include "core/log.h"

#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

std::string path_or_nothing(bool wanted, const std::string& path) { return wanted ? path : ""; }

}  // namespace

RunLog::RunLog(const TrainingArguments& arguments, std::int64_t first_step,
               std::int64_t total_steps, bool silent)
    : is_shown_(!silent && !arguments.json),
      logging_steps_(arguments.logging_steps),
      first_step_(first_step),
      total_steps_(total_steps),
      metrics_(path_or_nothing(!silent && arguments.report_to != "none",
                               arguments.output_dir + "/metrics.jsonl"),
               first_step),
      board_(
          path_or_nothing(!silent && arguments.report_to == "tensorboard", arguments.output_dir)),
      progress_(is_shown_ && !arguments.disable_tqdm) {}

double RunLog::seconds() const {
  return std::chrono::duration<double>(Clock::now() - started_).count();
}

double RunLog::median_update_seconds() const {
  std::vector<double> values = update_seconds_;
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void RunLog::end_update(const Update& update, const TrainingPosition& position, double epochs) {
  update_seconds_.push_back(std::chrono::duration<double>(Clock::now() - update_started_).count());
  num_samples_ += update.num_samples;
  last_loss_ = update.loss;
  const ProgressState shown{epochs,
                            position.global_step,
                            total_steps_,
                            update.loss,
                            static_cast<double>(num_samples_) / seconds(),
                            update.live_bytes,
                            update.peak_bytes};
  progress_.update(shown);
  if (position.global_step % logging_steps_ != 0 && position.global_step != total_steps_) return;
  write_metrics(update, position, epochs);
  progress_.log(shown);
}

void RunLog::write_metrics(const Update& update, const TrainingPosition& position, double epochs) {
  const double seconds = update_seconds_.back();
  Json line = Json::object();
  line.set("step", position.global_step)
      .set("epoch", epochs)
      .set("loss", update.loss)
      .set("grad_norm", update.grad_norm)
      .set("learning_rate", update.learning_rate)
      .set("samples", update.num_samples)
      .set("step_seconds", seconds)
      .set("live_bytes", update.live_bytes)
      .set("peak_bytes", update.peak_bytes)
      .set("skipped_updates", position.num_skipped_updates)
      .set("loss_scale", update.loss_scale);
  metrics_.write(line);
  board_.add_scalar("train/loss", update.loss, position.global_step);
  board_.add_scalar("train/grad_norm", update.grad_norm, position.global_step);
  board_.add_scalar("train/learning_rate", update.learning_rate, position.global_step);
  board_.add_scalar("train/samples_per_second",
                    static_cast<double>(update.num_samples) / std::max(seconds, 1e-9),
                    position.global_step);
  board_.add_scalar("memory/peak_bytes", static_cast<double>(update.peak_bytes),
                    position.global_step);
}

void RunLog::add_evaluation(const EvalResults& eval, std::int64_t step, double epochs) {
  Json line = Json::object();
  line.set("step", step).set("epoch", epochs).set("eval_loss", eval.loss);
  if (eval.accuracy) line.set("eval_accuracy", *eval.accuracy);
  if (eval.f1) line.set("eval_f1", *eval.f1);
  if (eval.perplexity) line.set("eval_perplexity", *eval.perplexity);
  metrics_.write(line);
  board_.add_scalar("eval/loss", eval.loss, step);
  if (eval.accuracy) board_.add_scalar("eval/accuracy", *eval.accuracy, step);
  progress_.finish();
  if (!is_shown_) return;
  log_info(
      fmt::format("epoch {:.2f}: eval loss {}{}", epochs, format_loss(eval.loss),
                  eval.accuracy ? fmt::format(", accuracy {:.2f}%", 100 * *eval.accuracy) : ""));
}

}  // namespace headroom
