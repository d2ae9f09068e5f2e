// How the steps of a SelectiveCode are run, and run again in backward.
#include "model/script_selective.h"

#include "core/engine.h"
#include "model/script_segment.h"

#include <headroom/core/error.h>

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

namespace headroom::script {

namespace autograd = torch::autograd;
using namespace torch::jit;

namespace {

bool contains(const std::vector<std::size_t>& slots, std::size_t slot) {
  return std::find(slots.begin(), slots.end(), slot) != slots.end();
}

}  // namespace

// Steps that are run again together, with what they read of others. Shared by all saved tensors
// that they give.
class SelectiveCode::Island {
 public:
  explicit Island(std::shared_ptr<const SelectiveCode> code) : code_(std::move(code)) {}

  /// Holds what a step reads, as the hooks around this run hold tensors.
  void hold(std::size_t slot, const IValue& value, SavedTensorHookSource* outer) {
    Held& held = held_[slot];
    if (held.is_set) return;
    held.is_set = true;
    if (!value.isTensor() || !value.toTensor().defined()) {
      held.value = value;
      return;
    }
    const at::Tensor& tensor = value.toTensor();
    held.version = static_cast<std::int64_t>(tensor._version());
    if (outer != nullptr) held.hooks = outer->make_hooks();
    if (held.hooks)
      held.hooks->call_pack_hook(tensor);
    else
      held.value = tensor.detach();
  }

  void drop(std::size_t slot, std::size_t step) {
    ++num_waiting_[slot];
    need(step);
  }

  /// After forward: lets go of what no dropped tensor needs.
  void finish() {
    for (auto held = held_.begin(); held != held_.end();)
      held = is_read(held->first) ? std::next(held) : held_.erase(held);
  }

  /// The tensor that a step gave; `is_last` when it is not asked for again by the same saved
  /// tensor.
  at::Tensor get(std::size_t slot, bool is_last) {
    if (given_.count(slot) == 0) run(is_last);
    at::Tensor tensor = given_.at(slot);
    if (is_last && --num_waiting_[slot] == 0) given_.erase(slot);
    return tensor;
  }

 private:
  struct Held {
    bool is_set = false;
    IValue value;
    std::unique_ptr<autograd::SavedVariableHooks> hooks;
    std::int64_t version = 0;

    IValue get() const {
      if (hooks) return hooks->call_unpack_hook();
      if (value.isTensor() && value.toTensor().defined() &&
          static_cast<std::int64_t>(value.toTensor()._version()) != version) {
        throw Error(ExitCode::kInternal,
                    "a tensor that backward has to read again was written to after forward");
      }
      return value;
    }
  };

  void need(std::size_t step) {
    if (!needed_.insert(step).second) return;
    for (const std::size_t other : code_->steps_[step].needs) need(other);
  }

  bool is_read(std::size_t slot) const {
    return std::any_of(needed_.begin(), needed_.end(), [&](std::size_t index) {
      const Step& step = code_->steps_[index];
      return contains(step.outside, slot) || contains(step.own, slot);
    });
  }

  void run(bool lets_go) {
    const torch::NoGradGuard no_grad;
    const SavedTensorHookScope no_hooks(nullptr);
    std::map<std::size_t, IValue> values;
    std::map<std::size_t, std::size_t> last_read;
    for (const std::size_t index : needed_) {
      for (const std::size_t slot : code_->steps_[index].again_inputs) last_read[slot] = index;
    }
    for (const std::size_t index : needed_) {
      const Step& step = code_->steps_[index];
      Stack stack;
      for (const std::size_t slot : step.again_inputs) {
        const auto held = held_.find(slot);
        const auto made = values.find(slot);
        stack.push_back(made != values.end() ? made->second : held->second.get());
        if (made != values.end() && last_read.at(slot) == index) values.erase(made);
      }
      run_code(step.again, stack);
      for (std::size_t i = 0; i < stack.size(); ++i) {
        const std::size_t slot = step.outputs[i];
        const auto waiting = num_waiting_.find(slot);
        if (waiting != num_waiting_.end() && waiting->second > 0)
          given_[slot] = stack[i].toTensor();
        if (last_read.count(slot) != 0) values[slot] = std::move(stack[i]);
      }
    }
    if (lets_go) held_.clear();
  }

  std::shared_ptr<const SelectiveCode> code_;
  std::map<std::size_t, Held> held_;  // by slot
  std::set<std::size_t> needed_;      // steps, in order
  std::map<std::size_t, int> num_waiting_;
  std::map<std::size_t, at::Tensor> given_;
};

// ---- Saved tensors.

// What has become of a tensor that autograd saved: known only when the step that saved it has
// ended.
class SelectiveCode::Saved {
 public:
  explicit Saved(const at::Tensor& tensor)
      : tensor_(tensor.detach()), version_(static_cast<std::int64_t>(tensor._version())) {}

  const at::Tensor& tensor() const { return tensor_; }

  void keep(SavedTensorHookSource* outer) {
    if (outer != nullptr) hooks_ = outer->make_hooks();
    if (!hooks_) return;
    hooks_->call_pack_hook(tensor_);
    tensor_ = at::Tensor();
  }

  /// Its elements are in the memory of `root`, which the island gives again.
  void drop(std::shared_ptr<Island> island, std::size_t slot, std::int64_t root_offset) {
    island_ = std::move(island);
    slot_ = slot;
    sizes_ = tensor_.sizes().vec();
    strides_ = tensor_.strides().vec();
    offset_ = tensor_.storage_offset() - root_offset;
    tensor_ = at::Tensor();
  }

  at::Tensor get() {
    if (hooks_) return hooks_->call_unpack_hook();
    if (island_) {
      const torch::NoGradGuard no_grad;
      const at::Tensor root = island_->get(slot_, !backward_keeps_graph());
      return root.as_strided(sizes_, strides_, root.storage_offset() + offset_);
    }
    TORCH_CHECK(static_cast<std::int64_t>(tensor_._version()) == version_,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation");
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  std::int64_t version_;
  std::unique_ptr<autograd::SavedVariableHooks> hooks_;
  std::shared_ptr<Island> island_;
  std::size_t slot_ = 0;
  std::vector<std::int64_t> sizes_, strides_;
  std::int64_t offset_ = 0;
};

// ---- Forward.

class SelectiveCode::Forward final : public SavedTensorHookSource {
 public:
  explicit Forward(const SelectiveCode& code)
      : code_(code), slots_(code.num_slots_), outer_(current_hook_source()) {
    for (std::size_t i = 0; i < code.num_islands_; ++i)
      islands_.push_back(std::make_shared<Island>(code.shared_from_this()));
  }

  Stack run(Stack inputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      note_memory(inputs[i], std::nullopt);
      slots_[i] = std::move(inputs[i]);
    }
    for (std::size_t i = 0; i < code_.steps_.size(); ++i) run_step(i);
    for (const std::shared_ptr<Island>& island : islands_) island->finish();
    Stack outputs;
    for (const std::size_t slot : code_.outputs_) outputs.push_back(slots_[slot]);
    return outputs;
  }

  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }

 private:
  // Where memory comes from that a step gave.
  struct Origin {
    std::size_t step;
    std::size_t slot;
    std::int64_t offset;  // of the tensor in its storage
    at::ScalarType type;
  };
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that its address is not used again
    std::optional<Origin> origin;                       // nothing: is kept
  };

  class Hooks final : public autograd::SavedVariableHooks {
   public:
    explicit Hooks(Forward& forward) : forward_(forward) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      saved_ = std::make_shared<Saved>(tensor);
      forward_.fresh_.push_back(saved_);
    }
    at::Tensor call_unpack_hook() override { return saved_->get(); }

   private:
    Forward& forward_;  // lives while tensors are packed
    std::shared_ptr<Saved> saved_;
  };

  void run_step(std::size_t index) {
    const Step& step = code_.steps_[index];
    Stack stack;
    stack.reserve(step.inputs.size());
    for (const std::size_t slot : step.outside)
      islands_[static_cast<std::size_t>(step.island)]->hold(slot, slots_[slot], outer_);
    for (const std::size_t slot : step.inputs) stack.push_back(slots_[slot]);
    for (const std::size_t slot : step.last_reads) slots_[slot] = IValue();
    {
      const SavedTensorHookScope hooks(this);
      run_code(step.code, stack);
    }
    for (std::size_t i = 0; i < step.outputs.size(); ++i) {
      const std::size_t slot = step.outputs[i];
      std::optional<Origin> origin;
      const bool is_own = contains(step.own, slot);
      // Exactly: what is computed again from rounded statistics would be another result.
      if (is_own) islands_[static_cast<std::size_t>(step.island)]->hold(slot, stack[i], nullptr);
      if (step.island >= 0 && !is_own && stack[i].isTensor() && stack[i].toTensor().defined()) {
        const at::Tensor& tensor = stack[i].toTensor();
        origin = Origin{index, slot, tensor.storage_offset(), tensor.scalar_type()};
      }
      note_memory(stack[i], origin);
      slots_[slot] = std::move(stack[i]);
    }
    for (const std::size_t slot : step.last_reads) slots_[slot] = IValue();
    settle();
  }

  void note_memory(const IValue& value, const std::optional<Origin>& origin) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().has_storage()) return;
    const c10::Storage& storage = value.toTensor().storage();
    memory_.emplace(storage.unsafeGetStorageImpl(), Memory{storage.getWeakStorageImpl(), origin});
  }

  // Decides about the tensors that the last step saved.
  void settle() {
    for (const std::shared_ptr<Saved>& saved : fresh_) {
      const at::Tensor& tensor = saved->tensor();
      const auto found = tensor.has_storage()
                             ? memory_.find(tensor.storage().unsafeGetStorageImpl())
                             : memory_.end();
      const bool is_dropped = found != memory_.end() && found->second.origin &&
                              found->second.origin->type == tensor.scalar_type();
      if (!is_dropped) {
        saved->keep(outer_);
        continue;
      }
      const Origin& origin = *found->second.origin;
      const auto number = static_cast<std::size_t>(code_.steps_[origin.step].island);
      islands_[number]->drop(origin.slot, origin.step);
      saved->drop(islands_[number], origin.slot, origin.offset);
    }
    fresh_.clear();
  }

  const SelectiveCode& code_;
  std::vector<IValue> slots_;
  SavedTensorHookSource* outer_;
  std::vector<std::shared_ptr<Island>> islands_;
  std::map<const void*, Memory> memory_;
  std::vector<std::shared_ptr<Saved>> fresh_;
};

Stack SelectiveCode::run(Stack inputs) const { return Forward(*this).run(std::move(inputs)); }

}  // namespace headroom::script
