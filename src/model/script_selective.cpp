#include "model/script_selective.h"

#include "core/engine.h"
#include "model/script_graph.h"
#include "model/script_norm.h"
#include "model/script_recompute.h"
#include "model/script_segment.h"

#include <headroom/core/error.h>

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

namespace headroom::script {

namespace autograd = torch::autograd;
using namespace torch::jit;

namespace {

bool contains(const std::vector<std::size_t>& slots, std::size_t slot) {
  return std::find(slots.begin(), slots.end(), slot) != slots.end();
}

}  // namespace

// ---- Making the steps.

class SelectiveCode::Builder {
 public:
  Builder(const Graph& graph, const std::set<const Node*>& recomputed, SelectiveCode& code)
      : graph_(graph), recomputed_(recomputed), code_(code) {}

  void build() {
    for (const Value* input : graph_.inputs()) slot_of(input);
    code_.num_inputs_ = code_.num_slots_;
    std::vector<const Node*> kept;  // in a row
    for (const Node* node : graph_.nodes()) {
      if (node->kind() == prim::Constant) continue;
      if (recomputed_.count(node) == 0) {
        kept.push_back(node);
        continue;
      }
      if (!kept.empty()) add_step(kept);
      kept.clear();
      add_recomputed_step(node);
    }
    if (!kept.empty()) add_step(kept);
    for (const Value* output : graph_.outputs()) add_output(output);
    find_last_reads();
    find_islands();
  }

 private:
  // Copies nodes into a graph of their own.
  class StepGraph {
   public:
    explicit StepGraph(Builder& builder) : builder_(builder) {}

    std::vector<std::size_t> inputs, outputs;  // slots

    void copy(const std::vector<const Node*>& nodes) {
      for (const Node* node : nodes) copy_node(node);
      add_outputs(nodes);
    }

    /// Of one node alone: what it gives for itself, behind what it gives to others.
    std::vector<std::size_t> copy_to_run_again(const Node* node) {
      copy({node});
      std::vector<std::size_t> own;
      if (is_training_norm(node)) {
        const Node* norm = map_.at(node->output())->node();
        for (const std::size_t i : {1, 2}) {
          graph_->registerOutput(const_cast<Value*>(norm->outputs()[i]));
          own.push_back(builder_.new_slot());
        }
        outputs.insert(outputs.end(), own.begin(), own.end());
      }
      return own;
    }

    /// The node for when it is run again, with what it gave for itself.
    void copy_again(const Node* node, const std::vector<std::size_t>& own) {
      if (is_training_norm(node)) {
        const ValueMap map = [this](Value* value) { return lookup(value); };
        Value* mean = add_input(c10::TensorType::get(), own[0]);
        Value* rstd = add_input(c10::TensorType::get(), own[1]);
        add(node, create_norm_again(*graph_, node, map, mean, rstd));
      } else {
        copy_node(node);
      }
      add_outputs({node});
    }

    Code code() const {
      graph_->lint();
      return Code(graph_, "headroom_step");
    }

   private:
    void copy_node(const Node* node) {
      const ValueMap map = [this](Value* value) { return lookup(value); };
      add(node, is_training_norm(node) ? create_norm(*graph_, node, map)
                                       : graph_->createClone(const_cast<Node*>(node), map));
    }

    void add(const Node* node, Node* copy) {
      graph_->insertNode(copy);
      for (std::size_t i = 0; i < node->outputs().size(); ++i)
        map_[node->outputs()[i]] = copy->outputs()[i];
    }

    void add_outputs(const std::vector<const Node*>& nodes) {
      for (const Node* node : nodes) {
        for (const Value* output : node->outputs()) {
          if (!builder_.is_read_behind(output, nodes)) continue;
          graph_->registerOutput(map_.at(output));
          outputs.push_back(builder_.slot_of(output));
        }
      }
    }

    Value* add_input(const c10::TypePtr& type, std::size_t slot) {
      Value* input = graph_->addInput();
      input->setType(type);
      inputs.push_back(slot);
      return input;
    }

    Value* lookup(const Value* value) {
      const auto found = map_.find(value);
      if (found != map_.end()) return found->second;
      if (value->node()->kind() == prim::Constant) {
        Node* constant = graph_->createClone(const_cast<Node*>(value->node()),
                                             [](Value* never) { return never; });
        graph_->prependNode(constant);
        return map_[value] = constant->output();
      }
      return map_[value] = add_input(value->type(), builder_.slot_of(value));
    }

    Builder& builder_;
    std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
    std::unordered_map<const Value*, Value*> map_;
  };

  std::size_t new_slot() { return code_.num_slots_++; }

  std::size_t slot_of(const Value* value) {
    const auto found = slots_.find(value);
    return found != slots_.end() ? found->second : slots_[value] = new_slot();
  }

  void add_step(const std::vector<const Node*>& nodes) {
    Step step;
    StepGraph graph(*this);
    graph.copy(nodes);
    step.code = graph.code();
    step.inputs = std::move(graph.inputs);
    step.outputs = std::move(graph.outputs);
    code_.steps_.push_back(std::move(step));
  }

  void add_recomputed_step(const Node* node) {
    Step step;
    StepGraph first(*this), again(*this);
    step.own = first.copy_to_run_again(node);
    step.code = first.code();
    step.inputs = std::move(first.inputs);
    step.outputs = std::move(first.outputs);
    again.copy_again(node, step.own);
    step.again = again.code();
    step.again_inputs = std::move(again.inputs);
    step.island = 0;
    code_.steps_.push_back(std::move(step));
  }

  // An output may be a constant, or an input that is only handed on.
  void add_output(const Value* output) {
    if (output->node()->kind() == prim::Constant && slots_.count(output) == 0)
      add_step({output->node()});
    code_.outputs_.push_back(slot_of(output));
  }

  bool is_read_behind(const Value* value, const std::vector<const Node*>& nodes) const {
    return std::any_of(value->uses().begin(), value->uses().end(), [&](const Use& use) {
      const Node* user = use.user;
      while (user->owningBlock() != graph_.block() && user->owningBlock()->owningNode() != nullptr)
        user = user->owningBlock()->owningNode();
      return std::find(nodes.begin(), nodes.end(), user) == nodes.end();
    });
  }

  void find_last_reads() {
    std::set<std::size_t> read_later(code_.outputs_.begin(), code_.outputs_.end());
    for (std::size_t i = code_.steps_.size(); i-- > 0;) {
      Step& step = code_.steps_[i];
      for (const auto* slots : {&step.inputs, &step.outputs}) {
        for (const std::size_t slot : *slots) {
          if (read_later.insert(slot).second) step.last_reads.push_back(slot);
        }
      }
    }
  }

  // Recomputed steps that read what another gave are of one island. A step that writes to memory is
  // run again with all others that read this memory, because what they were given has to be as it
  // is in the end.
  void find_islands() {
    std::map<std::size_t, std::size_t> maker;  // of a slot
    std::vector<int> island(code_.steps_.size(), -1);
    for (std::size_t i = 0; i < code_.steps_.size(); ++i) {
      Step& step = code_.steps_[i];
      for (const std::size_t slot : step.outputs) maker[slot] = i;
      if (step.island < 0) continue;
      island[i] = static_cast<int>(i);
      for (const std::size_t slot : step.again_inputs) {
        const auto made = maker.find(slot);
        if (made != maker.end() && made->second == i) continue;  // its own
        if (made == maker.end() || island[made->second] < 0) {
          step.outside.push_back(slot);
          continue;
        }
        step.needs.push_back(made->second);
        const int joined = island[made->second], here = island[i];
        std::replace(island.begin(), island.end(), joined, here);
      }
    }
    std::map<int, int> number;
    for (std::size_t i = 0; i < island.size(); ++i) {
      if (island[i] < 0) continue;
      number.emplace(island[i], static_cast<int>(number.size()));
      code_.steps_[i].island = number.at(island[i]);
    }
    code_.num_islands_ = number.size();
    need_writers();
  }

  void need_writers() {
    std::vector<std::size_t> writers;
    std::size_t index = 0;
    std::map<const Node*, std::size_t> step_of;
    for (const Node* node : graph_.nodes()) {
      if (node->kind() == prim::Constant) continue;
      if (recomputed_.count(node) != 0) {
        while (code_.steps_[index].island < 0) ++index;
        step_of[node] = index++;
      }
    }
    for (const auto& [node, step] : step_of) {
      const auto* schema = node->maybeSchema();
      if (schema != nullptr && schema->is_mutable()) writers.push_back(step);
    }
    // Few steps write; within an island whoever is run again has them run, too.
    for (const std::size_t writer : writers) {
      for (Step& step : code_.steps_) {
        if (step.island == code_.steps_[writer].island) step.needs.push_back(writer);
      }
    }
  }

  const Graph& graph_;
  const std::set<const Node*>& recomputed_;
  SelectiveCode& code_;
  std::unordered_map<const Value*, std::size_t> slots_;
};

std::shared_ptr<const SelectiveCode> SelectiveCode::make(const Graph& graph,
                                                         const std::set<const Node*>& recomputed) {
  const std::shared_ptr<SelectiveCode> code(new SelectiveCode());
  Builder(graph, recomputed, *code).build();
  return code;
}

// ---- Running them again.

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
