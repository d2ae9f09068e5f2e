#include "execute/profile.h"

#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include "memory/device_clock.h"
#include "memory/shape_meter.h"

#include "core/tensor_storage.h"
#include "execute/boundary_memory.h"
#include "execute/stage_profiler.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <utility>

namespace headroom {
namespace {

std::string shapes_text(const Tensors& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += tensor.defined() ? fmt::format("{}[{}]", c10::toString(tensor.scalar_type()),
                                           fmt::join(tensor.sizes().vec(), ","))
                             : "-";
  }
  return text;
}

// A stage that was measured, for the stages that are equal to it.
struct KnownStage {
  StageProfile profile;
  std::string output_shapes;
  Tensors outputs;  // where they take no memory
};

// Goes through a chain and measures each distinct stage once.
class ChainProfiler {
 public:
  ChainProfiler(const Chain& chain, const MicroBatch& micro, std::optional<at::ScalarType> half,
                std::optional<at::ScalarType> compute, const std::function<void()>& between_runs,
                const std::function<void(std::size_t)>& before_stage, const ChainProfile* counted)
      : chain_(chain),
        micro_(micro),
        between_runs_(between_runs),
        before_stage_(before_stage),
        stages_(chain, micro, half, compute, between_runs, counted) {
    for (const auto& tensors : {micro.inputs, micro.targets}) resident_.merge(storages_of(tensors));
    for (const auto& [name, tensor] : chain.named_tensors()) resident_.insert(storage_of(tensor));
  }

  /// Nothing when a stage does not fit in any way.
  std::optional<ChainProfile> run() {
    const auto start = DeviceClock::now();
    const OwnerScope owner(Owner::kActivations);
    ChainProfile profile;
    profile.num_samples = micro_.num_samples;
    profile.input_bytes = bytes_of(micro_.inputs) + bytes_of(micro_.targets);
    std::map<std::string, KnownStage> known;
    std::vector<std::vector<InputGradient>> places;
    Tensors inputs = micro_.inputs;
    Makers makers;
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      between_runs_();
      Stage& stage = chain_.stage(i);
      std::string key = stage.kind();
      if (!key.empty())
        key += fmt::format(" {} {} {} {} {}", shapes_text(inputs), i == 0,
                           i > stages_.first_trained(), stages_.num_tied(i), trained_text(i));
      const auto found = key.empty() ? known.end() : known.find(key);
      const bool is_known = found != known.end();
      KnownStage measured = is_known ? found->second : KnownStage{};
      const bool is_copy =
          is_known && !measured.profile.hands_on && can_stand_for_outputs(inputs, measured);
      if (!is_copy && before_stage_) before_stage_(i);
      Tensors outputs = is_copy    ? (stages_.has_memory() ? inputs : measured.outputs)
                        : is_known ? stages_.run_once(i, inputs)
                                   : stages_.measure(i, inputs, measured.profile);
      if (!is_known) {
        measured.output_shapes = shapes_text(outputs);
        if (!stages_.has_memory()) measured.outputs = outputs;
        ++profile.num_distinct;
        if (!key.empty()) known[key] = measured;
      }
      if (!stages_.fits()) return std::nullopt;
      StageProfile& costs = measured.profile;
      makers = add_carried(static_cast<int>(i) + 1, outputs, is_copy ? Makers{} : makers, costs);
      costs.grads_unallocated.name = costs.grads_preallocated.name = stage.name();
      places.push_back(std::move(costs.input_gradients));
      profile.grads_unallocated.stages.push_back(std::move(costs.grads_unallocated));
      profile.grads_preallocated.stages.push_back(std::move(costs.grads_preallocated));
      inputs = std::move(outputs);
    }
    add_gradients(places, profile);
    profile.is_complete = stages_.is_complete();
    profile.is_timed = stages_.has_memory();
    profile.seconds = std::chrono::duration<double>(DeviceClock::now() - start).count();
    return profile;
  }

 private:
  // Whether a stage that is measured already need not run again. What the stages behind it are
  // given must have the shapes of its outputs, and nobody minds the values: the inputs will do, if
  // their memory does not stay for ever.
  bool can_stand_for_outputs(const Tensors& inputs, const KnownStage& known) const {
    if (!stages_.has_memory()) return true;
    const std::set<const void*> storages = storages_of(inputs);
    return shapes_text(inputs) == known.output_shapes &&
           std::none_of(storages.begin(), storages.end(),
                        [&](const void* storage) { return resident_.count(storage) != 0; });
  }

  // Returns who made the memory of the output.
  Makers add_carried(int number, const Tensors& outputs, const Makers& makers,
                     StageProfile& profile) const {
    OutputMemory memory = find_output_memory(number, outputs, makers, resident_);
    for (StageCosts* costs : {&profile.grads_unallocated, &profile.grads_preallocated}) {
      for (const CarriedBytes& part : memory.carried) {
        costs->carried.push_back(part);
        costs->output_bytes += part.bytes;
      }
    }
    return std::move(memory.makers);
  }

  static void add_gradients(const std::vector<std::vector<InputGradient>>& places,
                            ChainProfile& profile) {
    const std::vector<GradientMemory> gradients = find_gradient_memory(places);
    for (ChainCosts* costs : {&profile.grads_unallocated, &profile.grads_preallocated}) {
      for (std::size_t l = 0; l < gradients.size(); ++l) {
        costs->stages[l].carried_grad_bytes = gradients[l].carried_bytes;
        if (l > 0) costs->stages[l - 1].grad_bytes = gradients[l].input_bytes;
      }
    }
  }

  // Which of its parameters a stage trains.
  std::string trained_text(std::size_t index) const {
    std::string text;
    if (const auto module = chain_.stage(index).module()) {
      for (const at::Tensor& parameter : module->parameters())
        text += parameter.requires_grad() ? '1' : '0';
    }
    return text;
  }

  const Chain& chain_;
  const MicroBatch& micro_;
  const std::function<void()>& between_runs_;
  const std::function<void(std::size_t)>& before_stage_;
  StageProfiler stages_;
  std::set<const void*> resident_;  // memory that stays: of inputs, targets, weights and buffers
};

at::Tensor shape_with(const at::Tensor& tensor, std::int64_t num_samples) {
  if (!tensor.defined()) return tensor;
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.at(0) = num_samples;
  return torch::empty(sizes, tensor.options().device(torch::kMeta));
}

}  // namespace

std::optional<ChainProfile> profile_chain(const Chain& chain, const MicroBatch& micro,
                                          std::optional<at::ScalarType> half,
                                          std::optional<at::ScalarType> compute,
                                          const std::function<void()>& between_runs,
                                          const std::function<void(std::size_t)>& before_stage,
                                          const ChainProfile* counted) {
  const RandomStateScope same_random_state(RandomState::capture());
  try {
    return ChainProfiler(chain, micro, half, compute, between_runs, before_stage, counted).run();
  } catch (const c10::OutOfMemoryError&) {
    release_failed_backward();
    return std::nullopt;
  }
}

std::optional<ChainProfile> count_chain(const Chain& chain, const MicroBatch& like,
                                        std::int64_t num_samples,
                                        std::optional<at::ScalarType> half) {
  if (!chain.runs_without_memory()) return std::nullopt;
  ShapeMeter::instance();
  MicroBatch shapes;
  shapes.num_samples = num_samples;
  shapes.num_items = like.num_items / std::max<std::int64_t>(1, like.num_samples) * num_samples;
  for (const at::Tensor& input : like.inputs)
    shapes.inputs.push_back(shape_with(input, num_samples));
  for (const at::Tensor& target : like.targets)
    shapes.targets.push_back(shape_with(target, num_samples));
  Tensors tensors;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const auto module = chain.stage(i).module();
    if (!module) continue;
    for (at::Tensor& parameter : module->parameters()) {
      parameter.mutable_grad() = at::Tensor();
      tensors.push_back(parameter);
    }
    for (const at::Tensor& buffer : module->buffers()) tensors.push_back(buffer);
  }
  const MetaSwapScope without(tensors);
  const CountOnlyScope count_only;
  try {
    return profile_chain(chain, shapes, half);
  } catch (const c10::Error&) {  // an operator that needs memory after all
    release_failed_backward();
    return std::nullopt;
  }
}

}  // namespace headroom
