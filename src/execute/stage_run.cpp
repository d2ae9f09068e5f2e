#include "execute/stage_run.h"

#include <headroom/core/error.h>
#include <headroom/execute/autocast.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include "core/tensor_hash.h"
#include "execute/training_kernels.h"
#include "ops/convert.h"
#include "ops/direct_gradient.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

at::Tensor make_gradient(const at::Tensor& parameter) {
  const OwnerScope owner(Owner::kGradients);
  return torch::empty_like(parameter, at::MemoryFormat::Contiguous);
}

// The form in which a boundary is held. Where `keep_as` has stored it for backward anyway, it is
// the same memory.
Tensors encode(const StageCall& call, const Tensors& outputs, const KeepAsScope* keep_as) {
  Tensors encoded;
  encoded.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    const bool converts =
        call.half && !call.is_last && output.defined() && output.scalar_type() == at::kFloat;
    at::Tensor half =
        converts && keep_as != nullptr ? keep_as->stored_half(output.detach()) : at::Tensor();
    if (converts && !half.defined()) half = convert(output.detach(), *call.half);
    encoded.push_back(converts || !output.defined() ? half : output.detach());
  }
  return encoded;
}

at::Tensor decode(const StageCall& call, const at::Tensor& input) {
  const bool converts =
      call.half && !call.is_first && input.defined() && input.scalar_type() == *call.half;
  return !input.defined() ? input : converts ? convert(input, at::kFloat) : input.detach();
}

int stage_option(const StageCall& call, int option) {
  return options_in_use(call.stage, call.half, call.compute).first + option;
}

// Precision as the call says, for one forward. Autocast has no cache of cast weights here: one that
// was made without gradients must not be found by a forward that needs them.
class ComputeScope {
 public:
  ComputeScope(const StageCall& call, const Tensors& inputs) : kept_type_(call.half) {
    if (call.compute) autocast_.emplace(inputs.at(0).device().type(), *call.compute);
    uncached_.emplace(AutocastState::capture());
  }

 private:
  KeptTypeScope kept_type_;
  std::optional<Autocast> autocast_;
  std::optional<AutocastStateScope> uncached_;
};

}  // namespace

OptionRange options_in_use(const Stage& stage, std::optional<at::ScalarType> half,
                           std::optional<at::ScalarType> compute) {
  if (half) return {stage.half_option(), stage.num_half_options()};
  const int first = compute ? stage.half_compute_option() : 0;
  return {first, static_cast<int>(stage.options().size()) - first};
}

std::size_t first_trained_stage(const Chain& chain) {
  std::size_t index = 0;
  for (; index < chain.size(); ++index) {
    const auto module = chain.stage(index).module();
    if (!module) continue;
    const Tensors parameters = module->parameters();
    if (std::any_of(parameters.begin(), parameters.end(),
                    [](const at::Tensor& parameter) { return parameter.requires_grad(); }))
      break;
  }
  return index;
}

Tensors forward_discarding(const StageCall& call, const Tensors& inputs) {
  const torch::NoGradGuard no_grad;
  const TrainingKernelsScope training_kernels;
  Tensors values;
  values.reserve(inputs.size());
  for (const at::Tensor& input : inputs) values.push_back(decode(call, input));
  Tensors outputs;
  {
    const ComputeScope compute(call, values);
    outputs = call.stage.forward(values, call.micro, stage_option(call, 0));
  }
  values.clear();
  return encode(call, outputs, nullptr);
}

KeptStage forward_keeping(const StageCall& call, const Tensors& inputs, int option,
                          const std::shared_ptr<StoredBoundary>& stored) {
  const torch::AutoGradMode with_grad(true);
  KeptStage kept;
  std::optional<KeepAsScope> keep_as;
  if (call.half) keep_as.emplace(*call.half == at::kHalf ? KeepAs::kFp16 : KeepAs::kBf16);
  Tensors values;
  values.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    at::Tensor value = decode(call, input);
    NodePtrOf<GradientTap> tap;
    if (call.wants_input_gradient && value.defined() && value.is_floating_point()) {
      tap = make_node<GradientTap>();
      torch::autograd::create_gradient_edge(value, tap);
      // The boundary is in memory as it is: a stage that saves its input must not store it a second
      // time.
      if (!stored && value.scalar_type() != input.scalar_type())
        keep_as->already_stored(value, input);
    }
    kept.taps.push_back(std::move(tap));
    values.push_back(std::move(value));
  }
  Tensors outputs;
  {
    std::optional<SavedFromBoundary> saved_inputs;
    if (stored) saved_inputs.emplace(stored, values);
    const ComputeScope compute(call, values);
    outputs = call.stage.forward(values, call.micro, stage_option(call, option));
  }
  values.clear();
  for (const at::Tensor& output : outputs) {
    kept.roots.push_back(output.defined() && output.requires_grad()
                             ? torch::autograd::impl::gradient_edge(output)
                             : torch::autograd::Edge());
  }
  kept.outputs = encode(call, outputs, keep_as ? &*keep_as : nullptr);
  return kept;
}

Tensors loss_gradient(const KeptStage& last, double scale) {
  return {torch::full_like(last.outputs.at(0), scale)};
}

Tensors backward_through(KeptStage kept, Tensors output_gradients) {
  torch::autograd::edge_list roots;
  Tensors seeds;
  for (std::size_t i = 0; i < kept.roots.size() && i < output_gradients.size(); ++i) {
    if (!kept.roots[i].is_valid() || !output_gradients[i].defined()) continue;
    roots.push_back(std::move(kept.roots[i]));
    seeds.push_back(std::move(output_gradients[i]));
  }
  kept.roots.clear();
  kept.outputs.clear();
  output_gradients.clear();
  if (!roots.empty()) {
    const DirectGradientScope direct(make_gradient);
    torch::autograd::Engine::get_default_engine().execute(roots, seeds, /*keep_graph=*/false,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, /*outputs=*/{});
  }
  Tensors input_gradients;
  input_gradients.reserve(kept.taps.size());
  for (const auto& tap : kept.taps)
    input_gradients.push_back(tap ? std::move(tap->gradient) : at::Tensor());
  return input_gradients;
}

std::uint64_t fingerprint(const Tensors& tensors) {
  std::uint64_t result = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) result = result * 1099511628211ULL + value_hash(tensor);
  }
  return result;
}

}  // namespace headroom
