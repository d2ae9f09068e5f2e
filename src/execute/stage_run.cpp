#include "execute/stage_run.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/ops/direct_gradient.h>

#include <fmt/format.h>
#include <torch/torch.h>

#include <cstring>
#include <string_view>
#include <utility>

namespace headroom {
namespace {

at::Tensor make_gradient(const at::Tensor& parameter) {
  const OwnerScope owner(Owner::kGradients);
  return torch::empty_like(parameter, at::MemoryFormat::Contiguous);
}

}  // namespace

Tensors forward_discarding(Stage& stage, const Tensors& inputs, const MicroBatch& micro) {
  const torch::NoGradGuard no_grad;
  return stage.forward(inputs, micro, 0);
}

KeptStage forward_keeping(Stage& stage, const Tensors& inputs, const MicroBatch& micro, int option, bool inputs_need_grad) {
  const torch::AutoGradMode with_grad(true);
  KeptStage kept;
  kept.inputs.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    at::Tensor leaf = input.defined() ? input.detach() : input;
    if (inputs_need_grad && leaf.defined() && leaf.is_floating_point()) leaf.requires_grad_(true);
    kept.inputs.push_back(std::move(leaf));
  }
  kept.outputs = stage.forward(kept.inputs, micro, option);
  return kept;
}

Tensors detached(const Tensors& tensors) {
  Tensors result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.defined() ? tensor.detach() : tensor);
  return result;
}

Tensors loss_gradient(const KeptStage& last, double scale) { return {torch::full_like(last.outputs.at(0).detach(), scale)}; }

Tensors backward_through(KeptStage kept, Tensors output_gradients) {
  Tensors roots;
  Tensors seeds;
  for (std::size_t i = 0; i < kept.outputs.size() && i < output_gradients.size(); ++i) {
    if (!kept.outputs[i].defined() || !kept.outputs[i].requires_grad() || !output_gradients[i].defined()) continue;
    roots.push_back(std::move(kept.outputs[i]));
    seeds.push_back(std::move(output_gradients[i]));
  }
  kept.outputs.clear();
  output_gradients.clear();
  if (!roots.empty()) {
    const DirectGradientScope direct(make_gradient);
    torch::autograd::backward(roots, seeds);
  }
  Tensors input_gradients;
  input_gradients.reserve(kept.inputs.size());
  for (const at::Tensor& input : kept.inputs) {
    input_gradients.push_back(input.defined() && input.requires_grad() ? input.grad() : at::Tensor());
  }
  return input_gradients;
}

StageState StageState::record(const Stage& stage) {
  StageState state;
  state.random_ = RandomState::capture();
  if (const auto module = stage.module()) {
    for (const at::Tensor& parameter : module->parameters()) {
      state.parameter_versions_.push_back(static_cast<std::uint32_t>(parameter._version()));
    }
  }
  return state;
}

void StageState::check_parameters(const Stage& stage) const {
  const auto module = stage.module();
  if (!module) return;
  std::size_t index = 0;
  for (const auto& item : module->named_parameters()) {
    if (static_cast<std::uint32_t>(item.value()._version()) != parameter_versions_[index++]) {
      throw Error(ExitCode::kInternal, fmt::format("stage '{}': parameter '{}' was changed between forward and recompute; "
                                                   "update parameters only after backward",
                                                   stage.name(), item.key()));
    }
  }
}

RecomputeScope::RecomputeScope(const Stage& stage, const StageState& state) : random_(state.random()) {
  const auto module = stage.module();
  if (!module) return;
  for (const at::Tensor& buffer : module->buffers()) {
    if (!buffer.defined() || buffer.numel() == 0) continue;
    const at::Tensor bytes = buffer.contiguous().cpu();
    buffers_.emplace_back(buffer, std::string(static_cast<const char*>(bytes.data_ptr()), bytes.nbytes()));
  }
}

RecomputeScope::~RecomputeScope() {
  for (auto& [buffer, bytes] : buffers_) {
    // data() has a version counter of its own: backward may have saved the buffer and must not see it as modified.
    at::Tensor plain = buffer.data();
    if (plain.is_cpu() && plain.is_contiguous()) {
      std::memcpy(plain.data_ptr(), bytes.data(), bytes.size());
    } else {
      plain.copy_(torch::from_blob(bytes.data(), plain.sizes(), plain.options().device(torch::kCPU)));
    }
  }
}

std::uint64_t fingerprint(const Tensors& tensors) {
  std::uint64_t result = 0;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    const at::Tensor bytes = tensor.detach().contiguous().cpu();
    const std::string_view view(static_cast<const char*>(bytes.data_ptr()), bytes.nbytes());
    result = result * 1099511628211ULL + std::hash<std::string_view>()(view);
  }
  return result;
}

}  // namespace headroom
