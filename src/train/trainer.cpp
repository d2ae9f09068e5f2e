#include <headroom/train/trainer.h>

#include <headroom/core/error.h>
#include <headroom/core/hash.h>
#include <headroom/core/log.h>
#include <headroom/data/split.h>
#include <headroom/execute/accumulator.h>

#include "train/trainer_state.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <utility>

namespace headroom {
namespace {

std::atomic<bool> stop_requested{false};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void make_output_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw ConfigError(fmt::format("--output_dir '{}' cannot be made: {}", folder, error.message()));
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

void warn_about_batch_norms(const Chain& chain) {
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (const auto module = chain.stage(i).module()) warn_about_batch_norm(*module, chain.stage(i).name());
  }
}

}  // namespace

Trainer::Trainer(TrainingArguments arguments, Chain chain, std::shared_ptr<const Dataset> train_data,
                 std::shared_ptr<const Dataset> eval_data)
    : state_(std::make_unique<State>()) {
  validate(arguments, {});
  if (chain.size() == 0) throw ConfigError("the chain has no stage: there is nothing to train");
  if (!train_data || train_data->size() == 0) throw DataError("there is no data to train on");
  State& state = *state_;
  state.arguments = std::move(arguments);
  state.chain = std::move(chain);
  state.train_data = std::move(train_data);
  state.eval_data = std::move(eval_data);
  state.named_parameters = state.chain.named_parameters();
  for (auto& [name, buffer] : state.chain.named_buffers()) state.buffers.push_back(buffer);
  if (state.named_parameters.empty()) throw ConfigError("the model has no parameter that requires a gradient");
  for (auto& [name, parameter] : state.named_parameters) MemoryMeter::instance().assign_owner(parameter, Owner::kWeights);
  for (const at::Tensor& buffer : state.buffers) MemoryMeter::instance().assign_owner(buffer, Owner::kWeights);
  ExecutorOptions executor_options;
  executor_options.check_recomputed_values = state.arguments.recompute_check;
  state.choose_precision();
  executor_options.keep_in_half = state.keep_in_half;
  executor_options.compute_in_half = state.compute_in_half;
  if (!state.arguments.spill_dir.empty()) {
    executor_options.boundary_formats = {KeepAs::kDisk};
    executor_options.spill_dir = state.arguments.spill_dir;
  }
  executor_options.on_operation = [this](std::size_t operation) { state_->timeline.record(operation, state_->has_planned_size); };
  state.executor = std::make_unique<Executor>(state.chain, std::move(executor_options));
  state.loader = std::make_unique<MicroBatchLoader>([this](c10::ArrayRef<std::int64_t> indices) { return state_->load(indices); },
                                                    state.arguments.dataloader_num_workers > 0);
}

Trainer::~Trainer() = default;

void Trainer::request_stop() { stop_requested = true; }

bool Trainer::was_interrupted() const { return state_->interrupted; }

RunPlan Trainer::plan() {
  State& state = *state_;
  MemoryMeter::instance().set_cap(state.arguments.memory_budget_bytes);
  state.chain.train(true);
  state.look_at_first_window();
  state.update_ns = state.time_update();
  RunPlanRequest request = state.planning_request();
  request.with_alternatives = true;
  request.cache_folder.clear();  // a plan that is only shown leaves nothing behind
  RunPlan plan = plan_run(request, state.chain);
  for (const std::string& name : optimizer_names()) plan.optimizer_state_bytes.emplace_back(name, state.optimizer_bytes(name));
  return plan;
}

TrainResults Trainer::train() {
  State& state = *state_;
  const TrainingArguments& arguments = state.arguments;
  stop_requested = false;
  make_output_folder(arguments.output_dir);
  MemoryMeter& meter = MemoryMeter::instance();
  meter.set_cap(arguments.memory_budget_bytes);

  // A snapshot is checked before anything costly is done for it.
  const std::string snapshot = state.snapshot_to_resume();
  state.look_at_first_window();
  std::int64_t saved_micro_batch = 0;
  if (!snapshot.empty()) {
    const TrainingPosition saved = snapshot_position(snapshot, state.resume_settings());
    state.position.micro_batch_by_shape = saved.micro_batch_by_shape;
    saved_micro_batch = saved.micro_batch;
  }
  if (arguments.memory_budget_bytes > 0 || !arguments.gradient_checkpointing.empty()) state.update_ns = state.time_update();
  RunPlanRequest request = state.planning_request();
  // Another split would change the order of sums.
  if (request.fixed_micro_batch == 0 && state.bucket.empty()) request.fixed_micro_batch = std::min(saved_micro_batch, request.global_batch);
  state.use_plan(plan_run(request, state.chain));
  state.start_optimizer();
  if (snapshot.empty()) state.prepare_optimizer();  // else the snapshot brings the state: two of them might not fit
  const Grouping grouping = state.grouping();
  WindowWalk walk(grouping);
  write_file_atomically(arguments.output_dir + "/training_args.json", to_json(arguments).dump() + "\n");
  write_file_atomically(arguments.output_dir + "/plan.json", to_json(state.plan).dump() + "\n");
  if (state.plan.is_predicted && !arguments.json && !arguments.disable_tqdm) log_info(to_text(state.plan));
  const std::int64_t total_updates = arguments.max_steps > 0 ? arguments.max_steps : grouping.num_updates(arguments.num_train_epochs);
  LrScheduler scheduler(*state.optimizer,
                        LearningRateSchedule(parse_schedule_kind(arguments.lr_scheduler_type), total_updates, arguments.warmup_steps));
  if (!snapshot.empty()) {
    const auto splits = state.position.micro_batch_by_shape;
    state.position = load_snapshot(snapshot, state.chain, *state.optimizer, state.resume_settings());
    state.position.micro_batch_by_shape = splits;
    state.prepare_optimizer();
    scheduler.set_update(state.position.global_step - state.position.num_skipped_updates);
    state.scaler.restore(state.position.scaler);
    walk.seek(state.position.global_step);
    log_info(fmt::format("resumed from {} at update {}", snapshot, state.position.global_step));
  }
  state.position.micro_batch = state.plan.micro_batch;
  state.position.settings = state.resume_settings();
  state.position.scaler = state.scaler.state();
  if (balanced_sizes(std::min(grouping.window_samples(0), grouping.num_samples), state.plan.micro_batch).size() > 1) {
    warn_about_batch_norms(state.chain);
  }

  JsonLines metrics(arguments.report_to == "none" ? "" : arguments.output_dir + "/metrics.jsonl", state.position.global_step);
  TensorBoardWriter board(arguments.report_to == "tensorboard" ? arguments.output_dir : "");
  Progress progress(!arguments.disable_tqdm && !arguments.json);
  state.chain.train(true);
  meter.reset_peak();
  const std::int64_t first_step = state.position.global_step;
  std::int64_t num_samples = 0;
  std::vector<double> step_seconds;
  double final_loss = std::nan("");
  std::optional<EvalResults> last_eval;
  std::int64_t evaluated_at = -1;
  const auto evaluate_now = [&] {
    last_eval = evaluate();
    evaluated_at = state.position.global_step;
    Json line = Json::object();
    line.set("step", state.position.global_step).set("epoch", walk.epochs_done()).set("eval_loss", last_eval->loss);
    if (last_eval->accuracy) line.set("eval_accuracy", *last_eval->accuracy);
    metrics.write(line);
    board.add_scalar("eval/loss", last_eval->loss, state.position.global_step);
    if (last_eval->accuracy) board.add_scalar("eval/accuracy", *last_eval->accuracy, state.position.global_step);
    progress.finish();
    if (!arguments.json) {
      log_info(fmt::format("epoch {:.2f}: eval loss {:.4f}{}", walk.epochs_done(), last_eval->loss,
                           last_eval->accuracy ? fmt::format(", accuracy {:.2f}%", 100 * *last_eval->accuracy) : ""));
    }
  };

  const auto started = Clock::now();
  while (state.position.global_step < total_updates && !stop_requested) {
    const auto step_started = Clock::now();
    const std::vector<std::int64_t> samples = walk.next();
    const double learning_rate = scheduler.learning_rate();
    const bool records = state.plan.is_predicted && state.position.global_step == first_step;
    if (records) state.timeline.start();
    const Update update = state.step_within_budget(samples, scheduler);
    if (records) {
      state.timeline.finish();
      write_file_atomically(arguments.output_dir + "/plan.json",
                            to_json(state.plan).set("timeline", state.timeline.points()).dump() + "\n");
      write_file_atomically(arguments.output_dir + "/trace.json", state.timeline.trace(state.plan).dump() + "\n");
    }
    const double seconds = seconds_since(step_started);
    ++state.position.global_step;
    if (update.applied) state.position.loss_sum += update.loss;
    final_loss = update.loss;
    num_samples += update.num_samples;
    step_seconds.push_back(seconds);

    const std::int64_t step = state.position.global_step;
    ProgressState shown{
        walk.epochs_done(), step, total_updates, update.loss, static_cast<double>(num_samples) / seconds_since(started), meter.live_bytes(),
        meter.peak_bytes()};
    progress.update(shown);
    if (step % arguments.logging_steps == 0 || step == total_updates) {
      state.log_metrics(metrics, board, update, walk.epochs_done(), learning_rate, seconds);
      progress.log(shown);
    }
    const bool epoch_ends = walk.epochs_done() == std::floor(walk.epochs_done());
    if (state.eval_data &&
        ((arguments.eval_strategy == "epoch" && epoch_ends) || (arguments.eval_strategy == "steps" && step % arguments.eval_steps == 0))) {
      evaluate_now();
    }
    if (arguments.save_steps > 0 && step % arguments.save_steps == 0) {
      save_snapshot(arguments.output_dir, state.chain, *state.optimizer, state.position, arguments.save_total_limit);
    }
  }
  const double runtime = seconds_since(started);
  progress.finish();
  state.interrupted = stop_requested && state.position.global_step < total_updates;
  if (state.interrupted) {
    const std::string folder =
        save_snapshot(arguments.output_dir, state.chain, *state.optimizer, state.position, arguments.save_total_limit);
    log_warning(fmt::format("interrupted at update {}; continue with --resume_from_checkpoint {}", state.position.global_step, folder));
  }
  // The peaks of training, not of evaluation or saving, are what the budget is about.
  TrainResults results = state.results(runtime, num_samples, first_step, walk.epochs_done(), step_seconds);
  results.final_loss = final_loss;
  if (state.eval_data && !state.interrupted && evaluated_at != state.position.global_step) evaluate_now();
  results.eval = last_eval;
  write_file_atomically(arguments.output_dir + "/train_results.json", to_json(results).dump() + "\n");
  return results;
}

void Trainer::State::log_metrics(JsonLines& metrics, TensorBoardWriter& board, const Update& update, double epochs, double learning_rate,
                                 double seconds) const {
  const MemoryMeter& meter = MemoryMeter::instance();
  Json line = Json::object();
  line.set("step", position.global_step)
      .set("epoch", epochs)
      .set("loss", update.loss)
      .set("grad_norm", update.grad_norm)
      .set("learning_rate", learning_rate)
      .set("samples", update.num_samples)
      .set("step_seconds", seconds)
      .set("live_bytes", meter.live_bytes())
      .set("peak_bytes", meter.peak_bytes())
      .set("skipped_updates", position.num_skipped_updates)
      .set("loss_scale", position.scaler.scale);
  metrics.write(line);
  board.add_scalar("train/loss", update.loss, position.global_step);
  board.add_scalar("train/grad_norm", update.grad_norm, position.global_step);
  board.add_scalar("train/learning_rate", learning_rate, position.global_step);
  board.add_scalar("train/samples_per_second", static_cast<double>(update.num_samples) / std::max(seconds, 1e-9), position.global_step);
  board.add_scalar("memory/peak_bytes", static_cast<double>(meter.peak_bytes()), position.global_step);
}

TrainResults Trainer::State::results(double runtime, std::int64_t num_samples, std::int64_t first_step, double epochs,
                                     const std::vector<double>& step_seconds) const {
  const MemoryUse use = MemoryMeter::instance().use();
  TrainResults results;
  results.train_runtime = runtime;
  results.train_samples_per_second = static_cast<double>(num_samples) / std::max(runtime, 1e-9);
  results.train_steps_per_second = static_cast<double>(position.global_step - first_step) / std::max(runtime, 1e-9);
  const std::int64_t num_applied = position.global_step - position.num_skipped_updates;
  results.train_loss = num_applied > 0 ? position.loss_sum / static_cast<double>(num_applied) : 0.0;
  results.epoch = epochs;
  results.global_step = position.global_step;
  results.peak_memory_bytes = use.peak_bytes;
  results.peak_activation_bytes = use.peak_by_owner[static_cast<std::size_t>(Owner::kActivations)];
  results.peak_rss_bytes = peak_resident_bytes();
  results.memory_budget_bytes = arguments.memory_budget_bytes;
  results.predicted_peak_bytes = predicted_peak_bytes();
  results.predicted_step_seconds = plan.predicted_step_seconds;
  results.measured_step_seconds = median(step_seconds);
  results.micro_batch_size = plan.micro_batch;
  results.gradient_accumulation_steps =
      static_cast<std::int64_t>(balanced_sizes(std::min(window_batch(), train_data->size()), plan.micro_batch).size());
  const std::int64_t first_forwards = work.num_forwards - work.num_recomputes;
  results.recomputed_forward_fraction =
      first_forwards > 0 ? static_cast<double>(work.num_recomputes) / static_cast<double>(first_forwards) : 0.0;
  for (std::size_t owner = 0; owner < kNumOwners; ++owner) {
    results.peak_bytes_by_owner[owner_name(static_cast<Owner>(owner))] = use.peak_by_owner[owner];
  }
  results.num_skipped_updates = position.num_skipped_updates;
  results.num_recoveries = num_recoveries;
  results.num_plans = num_plans;
  results.num_parameters = chain.num_parameters();
  results.weights_sha256 = weights_sha256(chain);
  return results;
}

EvalResults Trainer::evaluate() {
  State& state = *state_;
  if (!state.eval_data) throw ConfigError("there is no evaluation data");
  const torch::NoGradGuard no_grad;
  state.chain.train(false);
  // As many samples at once as in training: what fits there fits here.
  const std::int64_t batch = state.smallest_micro_batch();
  EvalResults results;
  double loss_sum = 0.0;
  std::int64_t num_items = 0;
  std::int64_t num_right_answers = 0;
  bool counts_answers = false;
  for (std::int64_t first = 0; first < state.eval_data->size(); first += batch) {
    std::vector<std::int64_t> indices;
    for (std::int64_t i = first; i < std::min(first + batch, state.eval_data->size()); ++i) indices.push_back(i);
    MicroBatch micro;
    {
      const OwnerScope owner(Owner::kInputs);
      micro = state.eval_data->load(indices);
    }
    const std::vector<at::Tensor> outputs = state.executor->evaluate(micro);
    loss_sum += outputs.at(0).item<double>();
    if (outputs.size() > 1) {
      num_right_answers += outputs[1].item<std::int64_t>();
      counts_answers = true;
    }
    num_items += micro.num_items;
    results.num_samples += micro.num_samples;
  }
  state.chain.train(true);
  results.loss = loss_sum / static_cast<double>(std::max<std::int64_t>(num_items, 1));
  if (counts_answers) results.accuracy = static_cast<double>(num_right_answers) / static_cast<double>(results.num_samples);
  return results;
}

std::string weights_sha256(const Chain& chain) {
  Sha256 hash;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    hash.update(bytes.data_ptr(), bytes.nbytes());
  };
  for (const auto& [name, tensor] : chain.named_parameters()) add(tensor);
  for (const auto& [name, tensor] : chain.named_buffers()) add(tensor);
  return hash.hex_digest();
}

}  // namespace headroom
