#include "execute/recompute_state.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "core/text.h"
#include "core/torch_compat.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace headroom {
namespace {

thread_local UndoWritesScope* undo_scope = nullptr;

bool is_in_place(std::string_view name) { return ends_with(name, "_") && !ends_with(name, "__"); }

// The buffers of a module that have something to keep.
std::vector<at::Tensor> kept_buffers(const torch::nn::Module& module) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined() && buffer.numel() > 0 && !buffer.is_meta()) buffers.push_back(buffer);
  }
  return buffers;
}

std::string contents_of(const at::Tensor& buffer) {
  const at::Tensor plain = buffer.contiguous().cpu();
  return {static_cast<const char*>(plain.data_ptr()), plain.nbytes()};
}

void set_bytes(const at::Tensor& buffer, const std::string& bytes) {
  // data() has a version counter of its own: backward may have saved the buffer and must not see it
  // as modified.
  at::Tensor plain = buffer.data();
  if (plain.is_cpu() && plain.is_contiguous()) {
    std::memcpy(plain.data_ptr(), bytes.data(), bytes.size());
  } else {
    plain.copy_(torch::from_blob(const_cast<char*>(bytes.data()), plain.sizes(),
                                 plain.options().device(torch::kCPU)));
  }
}

}  // namespace

AutocastState AutocastState::capture() {
  AutocastState state;
  state.cpu_enabled_ = HEADROOM_AUTOCAST_CPU_ENABLED();
  state.cuda_enabled_ = HEADROOM_AUTOCAST_CUDA_ENABLED();
  state.cpu_dtype_ = HEADROOM_AUTOCAST_CPU_DTYPE();
  state.cuda_dtype_ = HEADROOM_AUTOCAST_CUDA_DTYPE();
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

bool AutocastState::operator==(const AutocastState& other) const {
  return cpu_enabled_ == other.cpu_enabled_ && cuda_enabled_ == other.cuda_enabled_ &&
         cpu_dtype_ == other.cpu_dtype_ && cuda_dtype_ == other.cuda_dtype_ &&
         cache_enabled_ == other.cache_enabled_;
}

void AutocastState::restore() const {
  HEADROOM_AUTOCAST_SET_CPU_ENABLED(cpu_enabled_);
  HEADROOM_AUTOCAST_SET_CUDA_ENABLED(cuda_enabled_);
  HEADROOM_AUTOCAST_SET_CPU_DTYPE(cpu_dtype_);
  HEADROOM_AUTOCAST_SET_CUDA_DTYPE(cuda_dtype_);
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastStateScope::AutocastStateScope(const AutocastState& state)
    : before_(AutocastState::capture()) {
  AutocastState uncached = state;
  if (state.cpu_enabled_ || state.cuda_enabled_) uncached.cache_enabled_ = false;
  changed_ = !(uncached == before_);
  if (changed_) uncached.restore();
}

AutocastStateScope::~AutocastStateScope() {
  if (changed_) before_.restore();
}

TrainingFlags::TrainingFlags(const torch::nn::Module& module) {
  for (const std::shared_ptr<torch::nn::Module>& each : module.modules())
    flags_.emplace_back(each, each->is_training());
}

TrainingFlags TrainingFlags::exchange() const {
  TrainingFlags before;
  const auto differs = [](const auto& flag) { return flag.first->is_training() != flag.second; };
  if (std::none_of(flags_.begin(), flags_.end(), differs)) return before;
  for (const auto& [module, training] : flags_)
    before.flags_.emplace_back(module, module->is_training());
  // train() sets the modules inside as well; they come later in the list and get their own flags
  // then.
  for (const auto& [module, training] : flags_) {
    if (module->is_training() != training) module->train(training);
  }
  return before;
}

UndoWritesScope::UndoWritesScope()
    : outer_(undo_scope), newest_old_allocation_(MemoryMeter::instance().num_allocations()) {
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&UndoWritesScope::on_operation)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  undo_scope = this;
}

UndoWritesScope::~UndoWritesScope() {
  at::removeCallback(callback_);
  undo_scope = nullptr;
  const at::NoGradGuard no_grad;
  // Backwards, because a tensor may have been noted twice, as two views. Through variable_data, so
  // that no version is counted up.
  for (auto written = written_.rbegin(); written != written_.rend(); ++written) {
    written->tensor.variable_data().copy_(written->value_before);
  }
  undo_scope = outer_;
}

void UndoWritesScope::rethrow_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

std::unique_ptr<at::ObserverContext> UndoWritesScope::on_operation(
    const at::RecordFunction& operation) {
  UndoWritesScope* scope = undo_scope;
  if (!scope) return nullptr;
  const std::string_view name = operation.name();
  const c10::ArrayRef<const c10::IValue> inputs = operation.inputs();
  undo_scope = nullptr;  // what noting does is not noted
  try {
    if (is_in_place(name)) {
      if (!inputs.empty()) scope->note(inputs[0]);
    } else if (name.find("batch_norm") != std::string_view::npos &&
               name.find("backward") == std::string_view::npos && inputs.size() > 5) {
      const bool training = !inputs[5].isBool() || inputs[5].toBool();
      if (training) scope->note(inputs[3]), scope->note(inputs[4]);
    }
  } catch (...) {
    // LibTorch would swallow it here.
    if (!scope->failure_) scope->failure_ = std::current_exception();
  }
  undo_scope = scope;
  return nullptr;
}

void UndoWritesScope::note(const c10::IValue& argument) {
  if (argument.isTensor()) note(argument.toTensor());
  if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) note(tensor);
  }
}

void UndoWritesScope::note(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.requires_grad() || !tensor.has_storage()) return;
  if (MemoryMeter::instance().allocation_number(tensor) > newest_old_allocation_) return;
  for (const Written& written : written_) {
    if (written.tensor.data_ptr() == tensor.data_ptr() &&
        written.tensor.sizes() == tensor.sizes() && written.tensor.strides() == tensor.strides()) {
      return;
    }
  }
  const at::NoGradGuard no_grad;
  const at::Tensor target = tensor.detach();
  written_.push_back({target, target.clone()});
}

StageState StageState::record(const Stage& stage) {
  const auto module = stage.module();
  return record(stage, module ? module->parameters() : std::vector<at::Tensor>());
}

StageState StageState::record(const Stage& stage, const std::vector<at::Tensor>& parameters) {
  StageState state;
  state.random_ = RandomState::capture();
  if (stage.depends_on_buffers() && stage.module()) {
    for (const at::Tensor& buffer : kept_buffers(*stage.module()))
      state.buffers_.push_back(contents_of(buffer));
  }
  state.parameter_versions_.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters)
    state.parameter_versions_.push_back(static_cast<std::uint32_t>(parameter._version()));
  return state;
}

void StageState::check_parameters(const Stage& stage) const {
  const auto module = stage.module();
  if (!module) return;
  std::size_t index = 0;
  for (const auto& item : module->named_parameters()) {
    if (static_cast<std::uint32_t>(item.value()._version()) != parameter_versions_[index++]) {
      throw Error(
          ExitCode::kInternal,
          fmt::format("stage '{}': parameter '{}' was changed between forward and recompute; "
                      "update parameters only after backward",
                      stage.name(), item.key()));
    }
  }
}

RecomputeScope::RecomputeScope(const Stage& stage, const StageState& state)
    : random_(state.random()) {
  const auto module = stage.module();
  if (!module) return;
  for (const at::Tensor& buffer : kept_buffers(*module))
    buffers_.emplace_back(buffer, contents_of(buffer));
  for (std::size_t i = 0; i < state.buffers().size(); ++i)
    set_bytes(buffers_[i].first, state.buffers()[i]);
}

RecomputeScope::~RecomputeScope() {
  for (const auto& [buffer, bytes] : buffers_) set_bytes(buffer, bytes);
}

}  // namespace headroom
