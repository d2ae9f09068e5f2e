#include <headroom/train/trainer.h>

#include <headroom/core/error.h>
#include <headroom/data/split.h>
#include <headroom/execute/accumulator.h>

#include "train/trainer_state.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <utility>

namespace headroom {
namespace {

std::atomic<bool> stop_requested{false};

void make_output_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error)
    throw ConfigError(fmt::format("--output_dir '{}' cannot be made: {}", folder, error.message()));
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

// The other ranks must not wait for one that has failed.
template <typename Call>
auto leaving_on_errors(Communicator& comm, const Call& call) {
  try {
    return call();
  } catch (...) {
    comm.leave();
    throw;
  }
}

void warn_about_batch_norms(const Chain& chain) {
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (const auto module = chain.stage(i).module())
      warn_about_batch_norm(*module, chain.stage(i).name());
  }
}

}  // namespace

Trainer::Trainer(TrainingArguments arguments, Chain chain,
                 std::shared_ptr<const Dataset> train_data,
                 std::shared_ptr<const Dataset> eval_data,
                 std::shared_ptr<Communicator> communicator)
    : state_(std::make_unique<State>()) {
  validate(arguments, {});
  if (chain.size() == 0) throw ConfigError("the chain has no stage: there is nothing to train");
  if (!train_data || train_data->size() == 0) throw DataError("there is no data to train on");
  State& state = *state_;
  state.arguments = std::move(arguments);
  state.chain = std::move(chain);
  state.train_data = std::move(train_data);
  state.eval_data = std::move(eval_data);
  state.comm = communicator ? std::move(communicator) : make_single_communicator();
  state.num_ranks = state.comm->size();
  state.named_parameters = state.chain.named_parameters();
  for (auto& [name, buffer] : state.chain.named_buffers()) state.buffers.push_back(buffer);
  if (state.named_parameters.empty())
    throw ConfigError("the model has no parameter that requires a gradient");
  for (auto& [name, parameter] : state.named_parameters)
    MemoryMeter::instance().assign_owner(parameter, Owner::kWeights);
  for (const at::Tensor& buffer : state.buffers)
    MemoryMeter::instance().assign_owner(buffer, Owner::kWeights);
  ExecutorOptions executor_options;
  executor_options.check_recomputed_values = state.arguments.recompute_check;
  state.choose_precision();
  executor_options.keep_in_half = state.keep_in_half;
  executor_options.compute_in_half = state.compute_in_half;
  if (!state.arguments.spill_dir.empty()) {
    executor_options.boundary_formats = {KeepAs::kDisk};
    executor_options.spill_dir = state.arguments.spill_dir;
  }
  executor_options.on_operation = [this](std::size_t operation) {
    state_->timeline.record(operation, state_->has_planned_size);
  };
  state.executor = std::make_unique<Executor>(state.chain, std::move(executor_options));
  state.loader = std::make_unique<MicroBatchLoader>(
      [this](c10::ArrayRef<std::int64_t> indices) { return state_->load(indices); },
      state.arguments.dataloader_num_workers > 0);
}

Trainer::~Trainer() = default;

void Trainer::request_stop() { stop_requested = true; }

bool stop_is_requested() { return stop_requested; }

bool Trainer::was_interrupted() const { return state_->interrupted; }

RunPlan Trainer::plan() {
  State& state = *state_;
  if (state.comm->size() == 1) state.num_ranks = state.arguments.nproc_per_node;
  state.check_batch();
  MemoryMeter::instance().set_cap(state.arguments.memory_budget_bytes);
  state.chain.train(true);
  state.look_at_first_window();
  state.update_ns = state.time_update();
  RunPlanRequest request = state.planning_request();
  request.with_alternatives = true;
  request.cache_folder.clear();  // a plan that is only shown leaves nothing behind
  RunPlan plan = plan_run(request, state.chain);
  for (const std::string& name : optimizer_names())
    plan.optimizer_state_bytes.emplace_back(name, state.optimizer_bytes(name));
  return plan;
}

TrainResults Trainer::train() {
  return leaving_on_errors(*state_->comm, [&] { return state_->train(); });
}

EvalResults Trainer::evaluate() {
  return leaving_on_errors(*state_->comm, [&] { return state_->evaluate(); });
}

TrainResults Trainer::State::train() {
  begin();
  const std::string snapshot = snapshot_to_resume();
  plan_from_start(snapshot);
  start_optimizer();
  WindowWalk walk(grouping());
  const std::int64_t total_updates = arguments.max_steps > 0
                                         ? arguments.max_steps
                                         : grouping().num_updates(arguments.num_train_epochs);
  LrScheduler scheduler(*optimizer,
                        LearningRateSchedule(parse_schedule_kind(arguments.lr_scheduler_type),
                                             total_updates, arguments.warmup_steps));
  snapshot.empty() ? start_afresh() : go_on_from(snapshot, walk, scheduler);
  describe_run();
  position.micro_batch = plan.micro_batch;
  position.settings = resume_settings();
  position.scaler = scaler.state();

  chain.train(true);
  MemoryMeter::instance().reset_peak();
  RunLog log(arguments, position.global_step, total_updates, !comm->is_first());
  stops = comm->max(stop_requested ? 1 : 0) != 0;
  while (position.global_step < total_updates && !stops) {
    log.start_update();
    const double learning_rate = scheduler.learning_rate();
    const bool is_recorded = plan.is_predicted && position.global_step == log.first_step();
    if (is_recorded) timeline.start();
    const Update update = train_window(walk.next(), scheduler);
    if (is_recorded) write_timeline();
    ++position.global_step;
    if (update.applied) position.loss_sum += update.loss;
    log.end_update(update, position, walk.epochs_done(), learning_rate);
    if (is_time_to_evaluate(walk)) evaluate_and_log(log, walk.epochs_done());
    if (arguments.save_steps > 0 && position.global_step % arguments.save_steps == 0) save();
  }
  return finish(walk, log, total_updates);
}

void Trainer::State::begin() {
  stop_requested = false;
  eval.reset();
  evaluated_at = -1;
  if (arguments.nproc_per_node > 1 && comm->size() == 1) {
    throw ConfigError(
        fmt::format("--nproc_per_node {} without ranks: give the trainer a communicator of them",
                    arguments.nproc_per_node));
  }
  num_ranks = comm->size();
  check_batch();
  check_ranks_are_alike();
  if (comm->is_first()) make_output_folder(arguments.output_dir);
  MemoryMeter::instance().set_cap(arguments.memory_budget_bytes);
}

void Trainer::State::describe_run() const {
  if (!comm->is_first()) return;
  write("training_args.json", to_json(arguments));
  write("plan.json", to_json(plan));
  if (plan.is_predicted && !arguments.json && !arguments.disable_tqdm) tell(to_text(plan));
  const std::int64_t samples =
      share_of(std::min(grouping().window_samples(0), train_data->size()), 0, num_ranks).end;
  if (num_ranks > 1 || balanced_sizes(samples, plan.micro_batch).size() > 1)
    warn_about_batch_norms(chain);
}

void Trainer::State::write_timeline() {
  timeline.finish();
  if (!comm->is_first()) return;
  write("plan.json", to_json(plan).set("timeline", timeline.points()));
  write("trace.json", timeline.trace(plan));
}

bool Trainer::State::is_time_to_evaluate(const WindowWalk& walk) const {
  if (!eval_data) return false;
  if (arguments.eval_strategy == "steps") return position.global_step % arguments.eval_steps == 0;
  return arguments.eval_strategy == "epoch" && walk.epochs_done() == std::floor(walk.epochs_done());
}

void Trainer::State::evaluate_and_log(RunLog& log, double epochs) {
  eval = evaluate();
  evaluated_at = position.global_step;
  log.add_evaluation(*eval, position.global_step, epochs);
}

TrainResults Trainer::State::finish(const WindowWalk& walk, RunLog& log,
                                    std::int64_t total_updates) {
  log.finish();
  // The peaks of training, not of evaluation or saving, are what the budget is about.
  TrainResults results = this->results(log, walk.epochs_done());
  interrupted = stops && position.global_step < total_updates;
  if (interrupted) {
    warn(fmt::format("interrupted at update {}; continue with --resume_from_checkpoint {}",
                     position.global_step, save()));
  } else if (eval_data && evaluated_at != position.global_step) {
    evaluate_and_log(log, walk.epochs_done());
  }
  results.eval = eval;
  if (comm->is_first()) write("train_results.json", to_json(results));
  return results;
}

}  // namespace headroom
