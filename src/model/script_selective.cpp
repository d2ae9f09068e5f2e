#include "model/script_selective.h"

#include "model/script_graph.h"
#include "model/script_kernels.h"
#include "model/script_recompute.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

namespace headroom::script {

using namespace torch::jit;

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
      Node* own = create_own(*graph_, node, map);
      add(node, own != nullptr ? own : graph_->createClone(const_cast<Node*>(node), map));
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

}  // namespace headroom::script
