#include "execute/stage_profiler.h"

#include <headroom/memory/meter.h>
#include "memory/device_clock.h"
#include "memory/shape_meter.h"

#include "core/tensor_storage.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <set>
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

template <typename Work>
Measured measure_work(bool has_memory, Work work) {
  if (has_memory) return measure_by(MemoryMeter::instance(), work);
  // Operators on tensors and numbers make scalars of the numbers, on the CPU wherever the tensors
  // are.
  constexpr std::int64_t kScalarBytes = 64;
  Measured measured = measure_by(ShapeMeter::instance(), work);
  measured.peak_bytes += kScalarBytes;
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

// The type of a boundary's gradient: that of the value, which is fp32 where the boundary is only
// kept in half precision.
at::ScalarType gradient_type(const at::Tensor& boundary, std::optional<at::ScalarType> half) {
  return boundary.scalar_type() == half ? at::kFloat : boundary.scalar_type();
}

std::vector<GradientShape> shapes_of(const Tensors& tensors, std::optional<at::ScalarType> half) {
  std::vector<GradientShape> shapes;
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

}  // namespace

CleanGradients::CleanGradients(std::vector<at::Tensor> parameters)
    : parameters_(std::move(parameters)) {
  clear();
}

void CleanGradients::clear() {
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
}

StageProfiler::StageProfiler(const Chain& chain, const MicroBatch& micro,
                             std::optional<at::ScalarType> half,
                             std::optional<at::ScalarType> compute,
                             const std::function<void()>& between_runs, const ChainProfile* counted)
    : chain_(chain),
      micro_(micro),
      half_(half),
      compute_(compute),
      between_runs_(between_runs),
      counted_(counted),
      clean_(chain.parameters()),
      has_memory_(!micro.inputs.at(0).is_meta()),
      first_trained_(first_trained_stage(chain)) {
  // A tied parameter's gradient appears in the last stage that uses it; for the stages before it is
  // there already.
  for (std::size_t i = 0; i < chain.size(); ++i) {
    for (const at::Tensor& parameter : parameters_of(i))
      last_user_[parameter.unsafeGetTensorImpl()] = i;
  }
}

std::vector<at::Tensor> StageProfiler::parameters_of(std::size_t index) const {
  std::vector<at::Tensor> trained;
  if (const auto module = chain_.stage(index).module()) {
    for (const at::Tensor& parameter : module->parameters())
      if (parameter.requires_grad()) trained.push_back(parameter);
  }
  return trained;
}

std::size_t StageProfiler::num_tied(std::size_t index) const {
  std::size_t count = 0;
  for (const at::Tensor& parameter : parameters_of(index))
    count += last_user_.at(parameter.unsafeGetTensorImpl()) != index ? 1 : 0;
  return count;
}

Tensors StageProfiler::run_once(std::size_t index, const Tensors& inputs) {
  const RecomputeScope scope(chain_.stage(index), StageState::record(chain_.stage(index)));
  return forward_discarding(call(index), inputs);
}

StageCall StageProfiler::call(std::size_t index) const {
  return {chain_.stage(index),    micro_, index == 0, index + 1 == chain_.size(),
          index > first_trained_, half_,  compute_};
}

Tensors StageProfiler::measure(std::size_t index, const Tensors& inputs, StageProfile& profile) {
  Stage& stage = chain_.stage(index);
  const bool last = index + 1 == chain_.size();
  Tensors outputs;
  std::vector<GradientShape> shapes;
  if (has_memory_)
    outputs = run_once(
        index,
        inputs);  // the first run of a shape pays for setting up kernels, no part of a step
  Measured forward;
  repeat(has_memory_, [&] {
    outputs.clear();
    const std::int64_t fastest_ns = forward.ns;
    forward = measure_work(has_memory_, [&] { outputs = run_once(index, inputs); });
    return keep_fastest(forward.ns, fastest_ns);
  });

  StageCosts costs;
  costs.output_bytes = forward.after_bytes - forward.before_bytes;  // but for what is carried
  profile.hands_on = shared_bytes(outputs, storages_of(inputs)) > 0;
  costs.forward_ns = forward.ns;
  costs.forward_transient_bytes =
      std::max<std::int64_t>(0, forward.peak_bytes - forward.before_bytes - costs.output_bytes);
  profile.grads_unallocated = costs;
  profile.grads_preallocated = costs;
  if (!last && index >= first_trained_) shapes = shapes_of(outputs, half_);
  outputs.clear();  // options are measured with no more in memory than a real step has
  const int num_options = options_in_use(stage, half_, compute_).count;
  for (int option = 0; option < num_options; ++option) {
    between_runs_();
    measure_option(index, inputs, shapes, option, profile);
  }
  clean_.clear();
  if (!has_memory_) {
    set_unit_times(profile.grads_unallocated, micro_.num_samples);
    set_unit_times(profile.grads_preallocated, micro_.num_samples);
  }
  const std::vector<StageOption>& options = profile.grads_unallocated.options;
  if (std::none_of(options.begin(), options.end(),
                   [](const StageOption& option) { return option.fits; }))
    fits_ = false;
  return last ? Tensors{} : run_once(index, inputs);
}

bool StageProfiler::measure_times(std::size_t index, const Tensors& inputs,
                                  const std::vector<GradientShape>& shapes, int option,
                                  StageProfile& profile) {
  const StageCosts& known = counted_->grads_unallocated.stages[index];
  StageOption unallocated = known.options[static_cast<std::size_t>(option)];
  StageOption preallocated;
  try {
    for (at::Tensor& parameter : parameters_of(index))
      parameter.mutable_grad() = torch::zeros_like(parameter);
    std::int64_t none = 0;
    preallocated = measure_run(index, inputs, shapes, option, profile.input_gradients, &none);
  } catch (const c10::OutOfMemoryError&) {
    release_failed_backward();
    return false;
  }
  unallocated.forward_ns = preallocated.forward_ns;
  unallocated.backward_ns = preallocated.backward_ns;
  profile.grads_unallocated.param_grad_bytes = known.param_grad_bytes;
  profile.grads_unallocated.options.push_back(unallocated);
  profile.grads_preallocated.options.push_back(preallocated);
  return true;
}

void StageProfiler::measure_option(std::size_t index, const Tensors& inputs,
                                   const std::vector<GradientShape>& shapes, int option,
                                   StageProfile& profile) {
  constexpr std::int64_t kLongNs = 10'000'000;
  clean_.clear();
  if (counted_ != nullptr && profile.grads_unallocated.forward_ns > kLongNs) {
    if (measure_times(index, inputs, shapes, option, profile)) return;
    clean_.clear();
  }
  StageOption unallocated;
  StageOption preallocated;
  try {
    for (at::Tensor& parameter : parameters_of(index)) {
      if (last_user_.at(parameter.unsafeGetTensorImpl()) != index)
        parameter.mutable_grad() = torch::zeros_like(parameter);
    }
    unallocated = measure_run(index, inputs, shapes, option, profile.input_gradients,
                              &profile.grads_unallocated.param_grad_bytes);
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
      preallocated = measure_run(index, inputs, shapes, option, profile.input_gradients, &none);
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
  profile.grads_unallocated.options.push_back(unallocated);
  profile.grads_preallocated.options.push_back(preallocated);
}

StageOption StageProfiler::measure_run(std::size_t index, const Tensors& inputs,
                                       const std::vector<GradientShape>& shapes, int option,
                                       std::vector<InputGradient>& places,
                                       std::int64_t* new_gradient_bytes) {
  Stage& stage = chain_.stage(index);
  const bool last = index + 1 == chain_.size();
  KeptStage kept;
  const RecomputeScope scope(stage, StageState::record(stage));
  const Measured forward =
      measure_work(has_memory_, [&] { kept = forward_keeping(call(index), inputs, option); });

  StageOption costs;
  costs.kept_bytes = forward.after_bytes - forward.before_bytes;
  costs.forward_transient_bytes =
      std::max<std::int64_t>(0, forward.peak_bytes - forward.before_bytes - costs.kept_bytes);
  costs.forward_ns = forward.ns;

  Tensors gradient;
  const at::TensorOptions where = at::TensorOptions().device(micro_.inputs.at(0).device());
  for (const GradientShape& shape : shapes) {
    gradient.push_back(shape.exists ? torch::full(shape.sizes, 1e-3, where.dtype(shape.type))
                                    : at::Tensor());
  }
  const std::int64_t seed_bytes = bytes_of(gradient);
  std::vector<const void*> seeds;
  for (const at::Tensor& seed : gradient) seeds.push_back(storage_of(seed));
  Tensors input_gradient;
  const Measured backward = measure_work(has_memory_, [&] {
    if (last) gradient = loss_gradient(kept, 1.0);
    input_gradient = backward_through(std::move(kept), std::move(gradient));
  });
  if (places.empty()) places = locate_input_gradients(input_gradient, seeds);
  std::int64_t input_gradient_bytes = 0;  // in whatever memory
  std::set<const void*> seen;
  for (const at::Tensor& each : input_gradient) {
    const void* storage = storage_of(each);
    if (storage != nullptr && seen.insert(storage).second)
      input_gradient_bytes += static_cast<std::int64_t>(each.storage().nbytes());
  }
  *new_gradient_bytes =
      std::max<std::int64_t>(0, backward.after_bytes - forward.before_bytes - input_gradient_bytes);
  const std::int64_t expected = forward.before_bytes + costs.kept_bytes + seed_bytes +
                                allocated_bytes(places) + *new_gradient_bytes;
  costs.backward_transient_bytes = std::max<std::int64_t>(0, backward.peak_bytes - expected);
  costs.backward_ns = backward.ns;
  return costs;
}

}  // namespace headroom
