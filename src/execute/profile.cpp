#include "execute/profile.h"

#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include "memory/device_clock.h"
#include "memory/shape_meter.h"

#include "core/tensor_storage.h"
#include "execute/stage_run.h"

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

struct Measured {
  std::int64_t before_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t after_bytes = 0;
  std::int64_t ns = 0;
};

template <typename Meter, typename Work>
Measured measure_by(Meter& meter, Work work) {
  Measured measured;
  measured.before_bytes = meter.live_bytes();
  meter.reset_peak();
  const auto start = DeviceClock::now();
  work();
  measured.ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(DeviceClock::now() - start).count();
  measured.peak_bytes = meter.peak_bytes();
  measured.after_bytes = meter.live_bytes();
  return measured;
}

// Sets `ns` to the smaller of the two, 0 meaning not measured yet, and returns what the last
// measurement took.
std::int64_t keep_fastest(std::int64_t& ns, std::int64_t before_ns) {
  const std::int64_t measured = ns;
  if (before_ns > 0) ns = std::min(ns, before_ns);
  return measured;
}

// Short work is measured several times, because an interruption would be many times its length, and
// one stage may stand for a thousand. `work` returns the nanoseconds that it took.
template <typename Work>
void repeat(bool several_times, Work work) {
  constexpr std::int64_t kEnoughNs = 20'000'000;
  const int most_runs = several_times ? 7 : 1;
  std::int64_t spent_ns = 0;
  for (int run = 0; run < most_runs && spent_ns < kEnoughNs; ++run) spent_ns += work();
}

// Where nothing is computed nothing can be timed: each sample takes as long as any other in any
// stage, and backward twice that. Starting a stage takes a little, and so does what an option
// recomputes.
void set_unit_times(StageCosts& costs, std::int64_t num_samples) {
  constexpr std::int64_t kSampleNs = 1000, kStartNs = 10;
  const std::int64_t forward_ns = num_samples * kSampleNs + kStartNs;
  costs.forward_ns = forward_ns;
  for (std::size_t i = 0; i < costs.options.size(); ++i) {
    costs.options[i].forward_ns = forward_ns;
    costs.options[i].backward_ns = 2 * forward_ns + static_cast<std::int64_t>(i);
  }
}

std::set<const void*> storages_of(const Tensors& tensors) {
  std::set<const void*> storages;
  for (const at::Tensor& tensor : tensors) storages.insert(storage_of(tensor));
  storages.erase(nullptr);
  return storages;
}

// Of the bytes of `tensors`, those that need no memory beside `storages`: because they are there,
// or in another of the tensors.
std::int64_t shared_bytes(const Tensors& tensors, std::set<const void*> storages) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    const void* storage = storage_of(tensor);
    if (storage != nullptr && !storages.insert(storage).second)
      bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Which stage made the memory of each tensor of a boundary: 0 for what is always there.
using Makers = std::map<const void*, int>;

// The type of a boundary's gradient: that of the value, which is fp32 where the boundary is only
// kept in half precision.
at::ScalarType gradient_type(const at::Tensor& boundary, std::optional<at::ScalarType> half) {
  return boundary.scalar_type() == half ? at::kFloat : boundary.scalar_type();
}

// Shapes and types alone, which take no memory of either meter.
struct Shape {
  std::vector<std::int64_t> sizes;
  at::ScalarType gradient_type = at::kFloat;
  bool has_gradient = false;
};

std::vector<Shape> shapes_of(const Tensors& tensors, std::optional<at::ScalarType> half) {
  std::vector<Shape> shapes;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      shapes.emplace_back();
    } else {
      shapes.push_back(
          {tensor.sizes().vec(), gradient_type(tensor, half), tensor.is_floating_point()});
    }
  }
  return shapes;
}

std::string shapes_text(const Tensors& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += tensor.defined() ? fmt::format("{}[{}]", c10::toString(tensor.scalar_type()),
                                           fmt::join(tensor.sizes().vec(), ","))
                             : "-";
  }
  return text;
}

// Clears the gradients of everything that is profiled, now and when profiling ends, however it
// ends.
class CleanGradients {
 public:
  explicit CleanGradients(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    clear();
  }
  ~CleanGradients() { clear(); }
  CleanGradients(const CleanGradients&) = delete;
  CleanGradients& operator=(const CleanGradients&) = delete;
  void clear() {
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<at::Tensor> parameters_;
};

// Where the gradient of a stage's input is: in the memory of that of an output, of which it may be
// a view, or in memory that backward allocated.
struct InputGradient {
  int output = -1;
  int allocation = -1;     // the same for inputs that share one
  std::int64_t bytes = 0;  // of the allocation
};

std::vector<InputGradient> locate(const Tensors& input_gradients,
                                  const std::vector<const void*>& output_storages) {
  std::vector<InputGradient> places;
  std::vector<const void*> allocations;
  const auto index_in = [](const std::vector<const void*>& all, const void* storage) {
    const auto found = std::find(all.begin(), all.end(), storage);
    return found == all.end() ? -1 : static_cast<int>(found - all.begin());
  };
  for (const at::Tensor& gradient : input_gradients) {
    InputGradient place;
    if (const void* storage = storage_of(gradient)) {
      place.output = index_in(output_storages, storage);
      if (place.output < 0) {
        if (index_in(allocations, storage) < 0) allocations.push_back(storage);
        place.allocation = index_in(allocations, storage);
        place.bytes = static_cast<std::int64_t>(gradient.storage().nbytes());
      }
    }
    places.push_back(place);
  }
  return places;
}

std::int64_t allocated_bytes(const std::vector<InputGradient>& places) {
  std::map<int, std::int64_t> by_allocation;
  for (const InputGradient& place : places) {
    if (place.allocation >= 0) by_allocation[place.allocation] = place.bytes;
  }
  std::int64_t bytes = 0;
  for (const auto& [allocation, size] : by_allocation) bytes += size;
  return bytes;
}

struct StagePair {
  StageCosts grads_unallocated;
  StageCosts grads_preallocated;
  bool hands_on = false;                       // some memory of the input is memory of the output
  std::vector<InputGradient> input_gradients;  // as the first run had them; empty: none yet
  std::string output_shapes;
  Tensors outputs;  // where they take no memory
};

class ChainProfiler {
 public:
  ChainProfiler(const Chain& chain, const MicroBatch& micro, std::optional<at::ScalarType> half,
                std::optional<at::ScalarType> compute, const std::function<void()>& between_runs,
                const std::function<void(std::size_t)>& before_stage, const ChainProfile* counted)
      : chain_(chain),
        micro_(micro),
        half_(half),
        compute_(compute),
        between_runs_(between_runs),
        before_stage_(before_stage),
        counted_(counted),
        clean_(chain.parameters()),
        has_memory_(!micro.inputs.at(0).is_meta()),
        first_trained_(first_trained_stage(chain)) {
    // A tied parameter's gradient appears in the last stage that uses it; for the stages before it
    // is there already.
    for (std::size_t i = 0; i < chain.size(); ++i) {
      for (const at::Tensor& parameter : parameters_of(i))
        last_user_[parameter.unsafeGetTensorImpl()] = i;
    }
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
    std::map<std::string, StagePair> known;
    std::vector<std::vector<InputGradient>> places;
    Tensors inputs = micro_.inputs;
    Makers makers;
    for (std::size_t i = 0; i < chain_.size(); ++i) {
      between_runs_();
      Stage& stage = chain_.stage(i);
      std::string key = stage.kind();
      if (!key.empty())
        key += fmt::format(" {} {} {} {} {}", shapes_text(inputs), i == 0, i > first_trained_,
                           num_tied(i), trained_text(i));
      const auto found = key.empty() ? known.end() : known.find(key);
      const bool is_known = found != known.end();
      StagePair pair = is_known ? found->second : StagePair{};
      const bool is_copy = is_known && !pair.hands_on && can_stand_for_outputs(inputs, pair);
      if (!is_copy && before_stage_) before_stage_(i);
      Tensors outputs = is_copy    ? (has_memory_ ? inputs : pair.outputs)
                        : is_known ? run_once(i, inputs)
                                   : measure_stage(i, inputs, pair);
      if (!is_known) {
        pair.output_shapes = shapes_text(outputs);
        if (!has_memory_) pair.outputs = outputs;
        ++profile.num_distinct;
        if (!key.empty()) known[key] = pair;
      }
      if (!fits_) return std::nullopt;
      makers = add_carried(static_cast<int>(i) + 1, outputs, is_copy ? Makers{} : makers, pair);
      pair.grads_unallocated.name = pair.grads_preallocated.name = stage.name();
      places.push_back(std::move(pair.input_gradients));
      profile.grads_unallocated.stages.push_back(std::move(pair.grads_unallocated));
      profile.grads_preallocated.stages.push_back(std::move(pair.grads_preallocated));
      inputs = std::move(outputs);
    }
    add_gradients(places, profile);
    profile.is_complete = is_complete_;
    profile.is_timed = has_memory_;
    profile.seconds = std::chrono::duration<double>(DeviceClock::now() - start).count();
    return profile;
  }

 private:
  // Whether a stage that is measured already need not run again. What the stages behind it are
  // given must have the shapes of its outputs, and nobody minds the values: the inputs will do, if
  // their memory does not stay for ever.
  bool can_stand_for_outputs(const Tensors& inputs, const StagePair& known) const {
    if (!has_memory_) return true;
    const std::set<const void*> storages = storages_of(inputs);
    return shapes_text(inputs) == known.output_shapes &&
           std::none_of(storages.begin(), storages.end(),
                        [&](const void* storage) { return resident_.count(storage) != 0; });
  }

  // Memory that the output has from the input stays for as long as the boundary holds it, however
  // little of it the output reads. Returns who made the memory of the output.
  Makers add_carried(int number, const Tensors& outputs, const Makers& makers, StagePair& pair) {
    Makers made;
    std::map<int, std::int64_t> bytes_by_distance;
    for (const at::Tensor& output : outputs) {
      const void* storage = storage_of(output);
      if (storage == nullptr || resident_.count(storage) != 0) continue;
      const auto found = makers.find(storage);
      const int maker = found == makers.end() ? number : found->second;
      if (!made.emplace(storage, maker).second || maker == number) continue;
      bytes_by_distance[number - maker] += static_cast<std::int64_t>(output.storage().nbytes());
    }
    for (StageCosts* costs : {&pair.grads_unallocated, &pair.grads_preallocated}) {
      for (const auto& [distance, bytes] : bytes_by_distance) {
        costs->carried.push_back({distance, bytes});
        costs->output_bytes += bytes;
      }
    }
    return made;
  }

  // The gradient of a boundary occupies whatever memory its tensors are in: that of a far later
  // boundary, where they only pass through stages or are views.
  static void add_gradients(const std::vector<std::vector<InputGradient>>& places,
                            ChainProfile& profile) {
    using Memory = std::pair<std::size_t, int>;  // the stage that allocated it, and which one
    std::vector<Memory> outputs;
    const Memory none(0, -1);
    std::map<Memory, std::int64_t> sizes;
    const auto total = [&](const std::set<Memory>& memories) {
      std::int64_t bytes = 0;
      for (const Memory& memory : memories) bytes += sizes.at(memory);
      return bytes;
    };
    for (std::size_t l = places.size(); l-- > 0;) {
      std::vector<Memory> inputs;
      std::set<Memory> held, handed_on;
      for (const InputGradient& place : places[l]) {
        const auto output = static_cast<std::size_t>(place.output);
        Memory memory = none;
        if (place.output >= 0 && output < outputs.size()) memory = outputs[output];
        if (place.allocation >= 0) {
          memory = {l, place.allocation};
          sizes[memory] = place.bytes;
        }
        inputs.push_back(memory);
        if (memory == none) continue;
        held.insert(memory);
        if (memory.first != l) handed_on.insert(memory);
      }
      for (ChainCosts* costs : {&profile.grads_unallocated, &profile.grads_preallocated}) {
        costs->stages[l].carried_grad_bytes = total(handed_on);
        if (l > 0) costs->stages[l - 1].grad_bytes = total(held);
      }
      outputs = std::move(inputs);
    }
  }

  // Those that are trained.
  std::vector<at::Tensor> parameters_of(std::size_t index) const {
    std::vector<at::Tensor> trained;
    if (const auto module = chain_.stage(index).module()) {
      for (const at::Tensor& parameter : module->parameters())
        if (parameter.requires_grad()) trained.push_back(parameter);
    }
    return trained;
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

  std::size_t num_tied(std::size_t index) const {
    std::size_t count = 0;
    for (const at::Tensor& parameter : parameters_of(index))
      count += last_user_.at(parameter.unsafeGetTensorImpl()) != index ? 1 : 0;
    return count;
  }

  // Every run starts from the same random state and leaves the buffers as they were.
  Tensors run_once(std::size_t index, const Tensors& inputs) {
    const RecomputeScope scope(chain_.stage(index), StageState::record(chain_.stage(index)));
    return forward_discarding(call(index), inputs);
  }

  StageCall call(std::size_t index) const {
    return {chain_.stage(index),    micro_, index == 0, index + 1 == chain_.size(),
            index > first_trained_, half_,  compute_};
  }

  template <typename Work>
  Measured measure(Work work) const {
    if (has_memory_) return measure_by(MemoryMeter::instance(), work);
    // Operators on tensors and numbers make scalars of the numbers, on the CPU wherever the tensors
    // are.
    constexpr std::int64_t kScalarBytes = 64;
    Measured measured = measure_by(ShapeMeter::instance(), work);
    measured.peak_bytes += kScalarBytes;
    return measured;
  }

  Tensors measure_stage(std::size_t index, const Tensors& inputs, StagePair& pair) {
    Stage& stage = chain_.stage(index);
    const bool last = index + 1 == chain_.size();
    Tensors outputs;
    std::vector<Shape> shapes;
    if (has_memory_)
      outputs = run_once(
          index,
          inputs);  // the first run of a shape pays for setting up kernels, no part of a step
    Measured forward;
    repeat(has_memory_, [&] {
      outputs.clear();
      const std::int64_t fastest_ns = forward.ns;
      forward = measure([&] { outputs = run_once(index, inputs); });
      return keep_fastest(forward.ns, fastest_ns);
    });

    StageCosts costs;
    costs.output_bytes = forward.after_bytes - forward.before_bytes;  // but for what is carried
    pair.hands_on = shared_bytes(outputs, storages_of(inputs)) > 0;
    costs.forward_ns = forward.ns;
    costs.forward_transient_bytes =
        std::max<std::int64_t>(0, forward.peak_bytes - forward.before_bytes - costs.output_bytes);
    pair.grads_unallocated = costs;
    pair.grads_preallocated = costs;
    if (!last && index >= first_trained_) shapes = shapes_of(outputs, half_);
    outputs.clear();  // options are measured with no more in memory than a real step has
    const int num_options = options_in_use(stage, half_, compute_).count;
    for (int option = 0; option < num_options; ++option) {
      between_runs_();
      measure_option(index, inputs, shapes, option, pair);
    }
    clean_.clear();
    if (!has_memory_) {
      set_unit_times(pair.grads_unallocated, micro_.num_samples);
      set_unit_times(pair.grads_preallocated, micro_.num_samples);
    }
    const std::vector<StageOption>& options = pair.grads_unallocated.options;
    if (std::none_of(options.begin(), options.end(),
                     [](const StageOption& option) { return option.fits; }))
      fits_ = false;
    return last ? Tensors{} : run_once(index, inputs);
  }

  // Where bytes are known, one run of a stage that takes long tells its times. False when it does
  // not fit.
  bool measure_times(std::size_t index, const Tensors& inputs, const std::vector<Shape>& shapes,
                     int option, StagePair& pair) {
    const StageCosts& known = counted_->grads_unallocated.stages[index];
    StageOption unallocated = known.options[static_cast<std::size_t>(option)];
    StageOption preallocated;
    try {
      for (at::Tensor& parameter : parameters_of(index))
        parameter.mutable_grad() = torch::zeros_like(parameter);
      std::int64_t none = 0;
      preallocated = measure_run(index, inputs, shapes, option, pair.input_gradients, &none);
    } catch (const c10::OutOfMemoryError&) {
      release_failed_backward();
      return false;
    }
    unallocated.forward_ns = preallocated.forward_ns;
    unallocated.backward_ns = preallocated.backward_ns;
    pair.grads_unallocated.param_grad_bytes = known.param_grad_bytes;
    pair.grads_unallocated.options.push_back(unallocated);
    pair.grads_preallocated.options.push_back(preallocated);
    return true;
  }

  void measure_option(std::size_t index, const Tensors& inputs, const std::vector<Shape>& shapes,
                      int option, StagePair& pair) {
    constexpr std::int64_t kLongNs = 10'000'000;
    clean_.clear();
    if (counted_ != nullptr && pair.grads_unallocated.forward_ns > kLongNs) {
      if (measure_times(index, inputs, shapes, option, pair)) return;
      clean_.clear();
    }
    StageOption unallocated;
    StageOption preallocated;
    try {
      for (at::Tensor& parameter : parameters_of(index)) {
        if (last_user_.at(parameter.unsafeGetTensorImpl()) != index)
          parameter.mutable_grad() = torch::zeros_like(parameter);
      }
      unallocated = measure_run(index, inputs, shapes, option, pair.input_gradients,
                                &pair.grads_unallocated.param_grad_bytes);
    } catch (const c10::OutOfMemoryError&) {
      unallocated.fits = preallocated.fits = is_complete_ = false;
    }
    // Where gradients are there already, some stages need memory for another of each.
    try {
      preallocated.forward_ns = unallocated.forward_ns;
      preallocated.backward_ns = unallocated.backward_ns;
      repeat(has_memory_ && unallocated.fits, [&] {
        if (!unallocated.fits) return std::int64_t{0};
        std::int64_t none = 0;
        const StageOption before = preallocated;
        preallocated = measure_run(index, inputs, shapes, option, pair.input_gradients, &none);
        return keep_fastest(preallocated.forward_ns, before.forward_ns) +
               keep_fastest(preallocated.backward_ns, before.backward_ns);
      });
    } catch (const c10::OutOfMemoryError&) {
      preallocated.fits = is_complete_ = false;
    }
    if (!preallocated.fits) release_failed_backward();
    unallocated.forward_ns = preallocated.forward_ns =
        std::min(unallocated.forward_ns, preallocated.forward_ns);
    unallocated.backward_ns = preallocated.backward_ns =
        std::min(unallocated.backward_ns, preallocated.backward_ns);
    pair.grads_unallocated.options.push_back(unallocated);
    pair.grads_preallocated.options.push_back(preallocated);
  }

  // Forward and backward of one stage. `new_gradient_bytes` gets the parameter gradients that
  // appeared, and `places` where the gradients of the inputs are, unless it was known.
  StageOption measure_run(std::size_t index, const Tensors& inputs,
                          const std::vector<Shape>& shapes, int option,
                          std::vector<InputGradient>& places, std::int64_t* new_gradient_bytes) {
    Stage& stage = chain_.stage(index);
    const bool last = index + 1 == chain_.size();
    KeptStage kept;
    const RecomputeScope scope(stage, StageState::record(stage));
    const Measured forward = measure([&] { kept = forward_keeping(call(index), inputs, option); });

    StageOption costs;
    costs.kept_bytes = forward.after_bytes - forward.before_bytes;
    costs.forward_transient_bytes =
        std::max<std::int64_t>(0, forward.peak_bytes - forward.before_bytes - costs.kept_bytes);
    costs.forward_ns = forward.ns;

    Tensors gradient;
    const at::TensorOptions where = at::TensorOptions().device(micro_.inputs.at(0).device());
    for (const Shape& shape : shapes) {
      gradient.push_back(shape.has_gradient
                             ? torch::full(shape.sizes, 1e-3, where.dtype(shape.gradient_type))
                             : at::Tensor());
    }
    const std::int64_t seed_bytes = bytes_of(gradient);
    std::vector<const void*> seeds;
    for (const at::Tensor& seed : gradient) seeds.push_back(storage_of(seed));
    Tensors input_gradient;
    const Measured backward = measure([&] {
      if (last) gradient = loss_gradient(kept, 1.0);
      input_gradient = backward_through(std::move(kept), std::move(gradient));
    });
    if (places.empty()) places = locate(input_gradient, seeds);
    std::int64_t input_gradient_bytes = 0;  // in whatever memory
    std::set<const void*> seen;
    for (const at::Tensor& each : input_gradient) {
      const void* storage = storage_of(each);
      if (storage != nullptr && seen.insert(storage).second)
        input_gradient_bytes += static_cast<std::int64_t>(each.storage().nbytes());
    }
    *new_gradient_bytes = std::max<std::int64_t>(
        0, backward.after_bytes - forward.before_bytes - input_gradient_bytes);
    const std::int64_t expected = forward.before_bytes + costs.kept_bytes + seed_bytes +
                                  allocated_bytes(places) + *new_gradient_bytes;
    costs.backward_transient_bytes = std::max<std::int64_t>(0, backward.peak_bytes - expected);
    costs.backward_ns = backward.ns;
    return costs;
  }

  const Chain& chain_;
  const MicroBatch& micro_;
  std::optional<at::ScalarType> half_;
  std::optional<at::ScalarType> compute_;
  const std::function<void()>& between_runs_;
  const std::function<void(std::size_t)>& before_stage_;
  const ChainProfile* counted_;  // null: bytes are not known
  CleanGradients clean_;
  bool has_memory_;  // false: on the meta device, for bytes alone
  std::size_t first_trained_;
  bool is_complete_ = true;
  bool fits_ = true;  // every stage has an option that does
  std::map<const void*, std::size_t> last_user_;
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
