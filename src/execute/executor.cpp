#include <headroom/execute/executor.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>

#include "execute/stage_run.h"
#include "execute/stored_tensor.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace headroom {

// The tensors of one micro-batch on its way through the chain. Stage l reads boundary l and makes
// boundary l + 1; boundary 0 is the chain's input.
struct Executor::Run {
  Run(const Executor& owner, const MicroBatch& batch, double loss_scale)
      : executor(owner),
        micro(batch),
        scale(loss_scale),
        stages(owner.chain_.size()),
        boundaries(owner.chain_.size() + 1) {}

  struct StageTensors {
    std::optional<KeptStage> kept;
    std::optional<StageState> state;
    std::optional<std::uint64_t> fingerprint;
  };
  struct BoundaryTensors {
    Tensors slot;                            // when it is held on its own, as it is
    std::shared_ptr<StoredBoundary> stored;  // the same in another format,
    int format = 0;                          // which is this
    Tensors gradient;
  };

  Stage& stage(std::size_t index) const { return executor.stage(index); }
  StageCall call(std::size_t index) const { return executor.call(index, micro); }
  bool is_last(std::size_t index) const { return index + 1 == executor.chain_.size(); }

  // What the stage before kept, if it is kept: its output is the boundary.
  const KeptStage* kept_before(std::size_t boundary) const {
    const std::optional<KeptStage>& kept = stages[boundary - 1].kept;
    return kept ? &*kept : nullptr;
  }

  bool is_held(std::size_t boundary) const {
    return boundary == 0 || kept_before(boundary) || !boundaries[boundary].slot.empty() ||
           boundaries[boundary].stored;
  }

  Tensors read(std::size_t boundary) const {
    if (boundary == 0) return micro.inputs;
    if (const KeptStage* kept = kept_before(boundary)) return kept->outputs;
    if (!boundaries[boundary].slot.empty()) return boundaries[boundary].slot;
    if (boundaries[boundary].stored) return boundaries[boundary].stored->read();
    TORCH_INTERNAL_ASSERT(head_boundary == boundary, "the plan reads boundary ", boundary,
                          ", which is not in memory");
    return head;
  }

  void hold(std::size_t boundary, int format) {
    if (is_held(boundary)) return;
    BoundaryTensors& tensors = boundaries[boundary];
    tensors.slot = read(boundary);
    if (format == 0) return;
    const std::vector<KeepAs>& formats = executor.options_.boundary_formats;
    if (static_cast<std::size_t>(format) > formats.size()) {
      throw ConfigError(fmt::format(
          "the plan holds the output of stage '{}' in format {}, but the executor was told of {}",
          stage(boundary - 1).name(), format, formats.size()));
    }
    head.clear();
    std::size_t below = boundary - 1;
    while (!is_held(below)) --below;
    const bool is_alike = below > 0 && !kept_before(below) && boundaries[below].format == format;
    tensors.format = format;
    tensors.stored = std::make_shared<StoredBoundary>(
        std::exchange(tensors.slot, {}), formats[static_cast<std::size_t>(format - 1)],
        executor.spill_store_, is_alike ? boundaries[below].stored.get() : nullptr);
  }

  // After an operation that read it, a stored boundary is stored and no more, unless the next
  // operation is to find it.
  void drop_decoded(std::size_t boundary) {
    if (boundaries[boundary].stored && found_next != boundary) boundaries[boundary].stored->drop();
  }

  // Before an operation: what the next one is to find comes meanwhile.
  void expect(const Operation* next) {
    found_next.reset();
    if (next == nullptr || !next->finds_input) return;
    found_next = static_cast<std::size_t>(next->stage);
    if (boundaries[*found_next].stored) boundaries[*found_next].stored->fetch();
  }

  // The first forward of a stage records what it depends on; later ones reproduce it and leave no
  // trace.
  template <typename Forward>
  auto run_forward(std::size_t index, Forward forward) {
    const PhaseScope phase(Phase::kForward);
    ++result.num_forwards;
    std::optional<StageState>& state = stages[index].state;
    if (!state) {
      state = StageState::record(stage(index), executor.stage_parameters_[index]);
      return forward();
    }
    ++result.num_recomputes;
    state->check_parameters(stage(index));
    const RecomputeScope scope(stage(index), *state);
    return forward();
  }

  void check_values(std::size_t index, const Tensors& outputs) {
    if (!executor.options_.check_recomputed_values) return;
    const std::uint64_t value = fingerprint(outputs);
    std::optional<std::uint64_t>& first = stages[index].fingerprint;
    if (!first) first = value;
    if (*first == value) return;
    throw Error(ExitCode::kInternal,
                fmt::format("stage '{}' gave other values when it was recomputed; its forward may "
                            "depend only on its "
                            "inputs, its parameters and LibTorch's random generators",
                            stage(index).name()));
  }

  void forward(std::size_t index) {
    Tensors outputs =
        run_forward(index, [&] { return forward_discarding(call(index), read(index)); });
    drop_decoded(index);
    check_values(index, outputs);
    head = std::move(outputs);
    head_boundary = index + 1;
  }

  void forward_keep(std::size_t index, int option, int format) {
    hold(index, format);
    head.clear();
    StageTensors& tensors = stages[index];
    tensors.kept = run_forward(index, [&] {
      return forward_keeping(call(index), read(index), option, boundaries[index].stored);
    });
    drop_decoded(index);
    check_values(index, tensors.kept->outputs);
    if (is_last(index)) take_loss();
  }

  void take_loss() {
    const at::Tensor& loss = stages.back().kept->outputs.at(0);
    if (loss.numel() != 1) {
      throw ConfigError(
          fmt::format("the last stage '{}' must return the loss as a scalar, summed over the "
                      "items; it has {} elements",
                      stage(stages.size() - 1).name(), loss.numel()));
    }
    result.loss_sum = loss.item<double>();
  }

  void backward(std::size_t index) {
    const PhaseScope phase(Phase::kBackward);
    StageTensors& tensors = stages[index];
    Tensors gradient = is_last(index) ? loss_gradient(*tensors.kept, scale)
                                      : std::exchange(boundaries[index + 1].gradient, {});
    KeptStage kept = std::move(*tensors.kept);
    tensors.kept.reset();
    boundaries[index].gradient = backward_through(std::move(kept), std::move(gradient));
    drop_decoded(index);
    for (const at::Tensor& parameter : executor.stage_parameters_[index]) {
      if (parameter.grad().defined())
        MemoryMeter::instance().assign_owner(parameter.grad(), Owner::kGradients);
    }
  }

  void carry_out(const Operation& operation) {
    const auto index = static_cast<std::size_t>(operation.stage);
    switch (operation.kind) {
      case OperationKind::kForward:
        return forward(index);
      case OperationKind::kForwardStore:
        hold(index, operation.format);
        return forward(index);
      case OperationKind::kForwardKeep:
        return forward_keep(index, operation.option, operation.format);
      case OperationKind::kBackward:
        return backward(index);
      case OperationKind::kFree:
        boundaries[index].slot.clear();
        return boundaries[index].stored.reset();
    }
  }

  const Executor& executor;
  const MicroBatch& micro;
  double scale;
  MicroResult result;
  std::vector<StageTensors> stages;
  std::vector<BoundaryTensors> boundaries;
  Tensors head;  // the output of the forward before, which nothing else holds
  std::size_t head_boundary = 0;
  std::optional<std::size_t> found_next;  // the boundary that the next operation is to find
};

Executor::Executor(Chain chain, ExecutorOptions options, std::shared_ptr<Stage> last)
    : chain_(std::move(chain)),
      options_(std::move(options)),
      last_(std::move(last)),
      first_trained_(first_trained_stage(chain_)) {
  if (options_.keep_in_half && options_.compute_in_half) {
    throw ConfigError(
        "keep_in_half and compute_in_half exclude each other: what is computed in half precision "
        "is kept in it");
  }
  for (const KeepAs format : options_.boundary_formats) {
    if (!spill_store_) spill_store_ = kept_format(format).make_store(options_.spill_dir);
  }
  for (std::size_t i = 0; i < chain_.size(); ++i) {
    const auto module = stage(i).module();
    stage_parameters_.push_back(module ? module->parameters() : std::vector<at::Tensor>{});
  }
}

Executor::~Executor() = default;

Stage& Executor::stage(std::size_t index) const {
  return last_ && index + 1 == chain_.size() ? *last_ : chain_.stage(index);
}

StageCall Executor::call(std::size_t index, const MicroBatch& micro) const {
  return {stage(index),
          micro,
          index == 0,
          index + 1 == chain_.size(),
          index > first_trained_,
          options_.keep_in_half,
          options_.compute_in_half};
}

namespace {

// The operation that runs after one; null: none.
const Operation* after(const std::vector<Operation>& operations, std::size_t index) {
  for (std::size_t i = index + 1; i < operations.size(); ++i) {
    if (operations[i].kind != OperationKind::kFree) return &operations[i];
  }
  return nullptr;
}

}  // namespace

MicroResult Executor::accumulate(const MicroBatch& micro, const std::vector<Operation>& operations,
                                 double scale) {
  const OwnerScope owner(Owner::kActivations);
  Run run(*this, micro, scale);
  for (std::size_t i = 0; i < operations.size(); ++i) {
    if (options_.before_operation) options_.before_operation(i);
    if (operations[i].kind != OperationKind::kFree) run.expect(after(operations, i));
    run.carry_out(operations[i]);
    if (options_.on_operation) options_.on_operation(i);
  }
  return run.result;
}

std::vector<at::Tensor> Executor::evaluate(const MicroBatch& micro) const {
  return forward(micro, chain_.size());
}

std::vector<at::Tensor> Executor::forward(const MicroBatch& micro, std::size_t num_stages) const {
  const OwnerScope owner(Owner::kActivations);
  Tensors values = micro.inputs;
  for (std::size_t i = 0; i < num_stages; ++i) {
    if (options_.before_evaluated_stage) options_.before_evaluated_stage(i);
    values = forward_discarding(call(i, micro), values);
  }
  if (options_.before_evaluated_stage) options_.before_evaluated_stage(num_stages);
  return values;
}

std::vector<at::Tensor> Executor::evaluate_last(const std::vector<at::Tensor>& boundary,
                                                const MicroBatch& micro) const {
  const OwnerScope owner(Owner::kActivations);
  return forward_discarding(call(chain_.size() - 1, micro), boundary);
}

std::vector<Operation> keep_everything(std::size_t num_stages) {
  std::vector<Operation> operations;
  const auto end = static_cast<int>(num_stages);
  for (int stage = 0; stage < end; ++stage)
    operations.push_back({OperationKind::kForwardKeep, stage, 0, 0});
  for (int stage = end - 1; stage >= 0; --stage)
    operations.push_back({OperationKind::kBackward, stage, 0, 0});
  return operations;
}

}  // namespace headroom
