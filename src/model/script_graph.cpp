#include "model/script_graph.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>

#include <fmt/format.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/inline_fork_wait.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>

namespace headroom::script {
namespace {

using namespace torch::jit;

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

// Replaces what forward reads of `self`: tensors become inputs of the graph, anything else (flags,
// sizes, None) a constant.
class AttributeResolver {
 public:
  AttributeResolver(FlatGraph& flat, const Module& module) : flat_(flat) {
    for (const auto& parameter : module.named_parameters()) {
      parameters_.insert(parameter.value.unsafeGetTensorImpl());
      names_.emplace(parameter.value.unsafeGetTensorImpl(), parameter.name);
    }
    for (const auto& buffer : module.named_buffers())
      names_.emplace(buffer.value.unsafeGetTensorImpl(), buffer.name);
    objects_.emplace(flat.graph->inputs()[0],
                     std::make_pair(Object(module._ivalue()), std::string()));
  }

  void run() {
    resolve(flat_.graph->block());
    read_copies_of_written();
    for (auto node = dead_.rbegin(); node != dead_.rend(); ++node) {
      if ((*node)->kind() == prim::GetAttr && (*node)->output()->hasUses()) {
        throw ConfigError(
            fmt::format("the model hands one of its modules to {}, which cannot be cut: call the "
                        "module instead",
                        (*node)->output()->uses()[0].user->kind().toDisplayString()));
      }
      (*node)->destroy();
    }
    if (flat_.graph->inputs()[0]->hasUses()) {
      throw ConfigError(
          fmt::format("the model hands itself to {}, which cannot be cut: call its modules instead",
                      flat_.graph->inputs()[0]->uses()[0].user->kind().toDisplayString()));
    }
    flat_.graph->eraseInput(0);
  }

 private:
  void resolve(Block* block) {
    for (Node* node : block->nodes()) {
      for (Block* inner : node->blocks()) resolve(inner);
      if (node->kind() == prim::GetAttr && objects_.count(node->input()) != 0) {
        read_attribute(node);
      } else if (node->kind() == prim::SetAttr && objects_.count(node->inputs()[0]) != 0) {
        write_attribute(node);
      } else if (node->kind() == Symbol::fromQualString("aten::is_grad_enabled")) {
        // A stage that is recomputed runs forward without gradients first: both runs must take the
        // same path.
        replace_by_constant(node, true);
      }
    }
  }

  void read_attribute(Node* node) {
    auto [object, path] = objects_.at(node->input());
    const std::string name = joined(path, node->s(attr::name));
    const auto set = set_values_.find(name);
    const IValue value = object.attr(node->s(attr::name));
    if (set != set_values_.end()) {
      node->output()->replaceAllUsesWith(set->second);
    } else if (value.isObject()) {
      objects_.emplace(node->output(), std::make_pair(Object(value.toObject()), name));
    } else if (value.isTensor() && value.toTensor().defined()) {
      node->output()->replaceAllUsesWith(input_for(value.toTensor(), name));
    } else if (value.isTensorList()) {
      const WithInsertPoint here(node);
      std::vector<Value*> tensors;
      for (const at::Tensor& tensor : value.toTensorVector())
        tensors.push_back(input_for(tensor, fmt::format("{}.{}", name, tensors.size())));
      Node* list = flat_.graph->createList(c10::TensorType::get(), tensors);
      node->output()->replaceAllUsesWith(flat_.graph->insertNode(list)->output());
    } else {
      const WithInsertPoint here(node);
      const auto constant = tryInsertConstant(*flat_.graph, value);
      if (!constant) {
        throw ConfigError(
            fmt::format("the model's attribute '{}' of type {} cannot be read when "
                        "the model is cut: make it a number, a tensor or a list",
                        name, value.type()->str()));
      }
      (*constant)->setType(node->output()->type());  // Optional[Tensor] stays one
      node->output()->replaceAllUsesWith(*constant);
    }
    dead_.push_back(node);
  }

  // The tensor keeps its identity and is written in place, so that it is saved with the model. What
  // reads the attribute later in the same run gets the value itself, with its gradient.
  void write_attribute(Node* node) {
    auto [object, path] = objects_.at(node->inputs()[0]);
    const std::string name = joined(path, node->s(attr::name));
    const IValue value = object.attr(node->s(attr::name));
    if (!value.isTensor() || !value.toTensor().defined()) {
      throw ConfigError(
          fmt::format("the model's forward sets its attribute '{}', which is no tensor: keep it in "
                      "a buffer (register_buffer)",
                      name));
    }
    const WithInsertPoint here(node);
    Value* plain = flat_.graph->insert(aten::detach, {node->inputs()[1]});
    Value* buffer = input_for(value.toTensor(), name);
    writes_[buffer].insert(flat_.graph->insert(aten::copy_, {buffer, plain})->node());
    if (node->owningBlock() == flat_.graph->block()) {
      set_values_[name] = node->inputs()[1];
    } else {
      set_values_.erase(name);
    }
    dead_.push_back(node);
  }

  // A model that replaces an attribute leaves the tensor that it read as it was, for backward too:
  // who reads it here reads a copy.
  void read_copies_of_written() {
    for (auto& [buffer, writes] : writes_) {
      std::vector<Use> reads;
      for (const Use& use : buffer->uses()) {
        if (writes.count(use.user) == 0) reads.push_back(use);
      }
      if (reads.empty()) continue;
      const WithInsertPoint here(*flat_.graph->nodes().begin());
      Value* copy = flat_.graph->insert(aten::clone, {buffer});
      for (const Use& use : reads) use.user->replaceInput(use.offset, copy);
    }
  }

  void replace_by_constant(Node* node, const IValue& value) {
    const WithInsertPoint here(node);
    node->output()->replaceAllUsesWith(flat_.graph->insertConstant(value));
    dead_.push_back(node);
  }

  Value* input_for(const at::Tensor& tensor, const std::string& name) {
    Value*& value = inputs_[tensor.unsafeGetTensorImpl()];
    if (value == nullptr) {
      value = flat_.graph->addInput();
      value->setType(c10::TensorType::get());
      const auto known = names_.find(tensor.unsafeGetTensorImpl());
      flat_.state.push_back({known != names_.end() ? known->second : name, tensor,
                             parameters_.count(tensor.unsafeGetTensorImpl()) != 0});
    }
    return value;
  }

  FlatGraph& flat_;
  std::set<const void*> parameters_;
  std::unordered_map<const void*, std::string> names_;
  std::unordered_map<Value*, std::pair<Object, std::string>> objects_;
  std::unordered_map<at::TensorImpl*, Value*> inputs_;
  std::map<std::string, Value*> set_values_;
  std::unordered_map<Value*, std::set<const Node*>> writes_;
  std::vector<Node*> dead_;
};

// Whether a node writes to the memory of `value`, by itself or through a view. (An AliasDb knows
// nothing of what comes from outside, and takes all inputs of a graph for one.)
bool is_written(const Value* value) {
  for (const Use& use : value->uses()) {
    const auto* schema = use.user->maybeSchema();
    if (schema == nullptr || use.offset >= schema->arguments().size()) continue;
    const auto* alias = schema->arguments()[use.offset].alias_info();
    if (alias == nullptr) continue;
    if (alias->isWrite()) return true;
    for (const Value* output : use.user->outputs()) {
      if (is_written(output)) return true;
    }
  }
  return false;
}

// An argument that forward writes to would be another one for the next run, so that runs read a
// copy of their own.
void copy_written_arguments(FlatGraph& flat) {
  for (std::size_t i = 0; i < flat.num_arguments; ++i) {
    Value* argument = flat.graph->inputs()[i];
    if (!is_tensor(argument) || !is_written(argument)) continue;
    const WithInsertPoint here(*flat.graph->nodes().begin());
    Value* copy = flat.graph->insert(aten::clone, {argument});
    argument->replaceAllUsesAfterNodeWith(copy->node(), copy);
  }
}

void check_writes(const FlatGraph& flat) {
  for (std::size_t i = 0; i < flat.state.size(); ++i) {
    const StateTensor& state = flat.state[i];
    if (!state.is_parameter || !is_written(flat.graph->inputs()[flat.num_arguments + i])) continue;
    throw ConfigError(
        fmt::format("the model's forward writes to its parameter '{}', which recomputing would do "
                    "again: write to a copy of it (in an Embedding: leave out max_norm)",
                    state.name));
  }
}

}  // namespace

bool is_tensor(const Value* value) { return value->type()->isSubtypeOf(*c10::TensorType::get()); }

const StateTensor* FlatGraph::state_of(const Value* value) const {
  if (value->node() != graph->param_node() || value->offset() < num_arguments) return nullptr;
  return &state[value->offset() - num_arguments];
}

bool has_fused_layers(const Block* block) {
  return std::any_of(block->nodes().begin(), block->nodes().end(), [](const Node* node) {
    const std::string_view kind = node->kind().toQualString();
    const auto blocks = node->blocks();
    return kind == "aten::_transformer_encoder_layer_fwd" ||
           kind == "aten::_native_multi_head_attention" ||
           std::any_of(blocks.begin(), blocks.end(),
                       [](const Block* inner) { return has_fused_layers(inner); });
  });
}

bool has_fused_layers(const Module& module) {
  const std::shared_ptr<Graph> graph = module.get_method("forward").graph()->copy();
  Inline(*graph);
  return has_fused_layers(graph->block());
}

FlatGraph flatten(const Module& module, const FixedArguments& fixed) {
  FlatGraph flat;
  flat.graph = module.get_method("forward").graph()->copy();
  Inline(*flat.graph);
  InlineForkWait(flat.graph);
  for (const auto& [index, value] : fixed) {
    const WithInsertPoint here(*flat.graph->nodes().begin());
    flat.graph->inputs().at(index + 1)->replaceAllUsesWith(flat.graph->insertConstant(value));
  }
  flat.num_arguments = flat.graph->inputs().size() - 1;
  AttributeResolver(flat, module).run();
  simplify(flat.graph);
  copy_written_arguments(flat);
  check_writes(flat);
  return flat;
}

FlatGraph trace(const std::function<Stack(Stack)>& function, const Stack& inputs,
                std::vector<StateTensor> state) {
  const RandomState random = RandomState::capture();
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  for (const StateTensor& each : state) {
    if (!each.is_parameter) buffers.emplace_back(each.tensor, each.tensor.detach().clone());
  }
  FlatGraph flat;
  flat.num_arguments = inputs.size();
  flat.state = std::move(state);
  // The tracer finds values by the identity of tensors: live parameters that are given as inputs
  // become inputs of the graph.
  Stack all = inputs;
  for (const StateTensor& each : flat.state) all.emplace_back(each.tensor);
  const auto traced = tracer::trace(
      all,
      [&](Stack stack) {
        stack.resize(inputs.size());
        return function(std::move(stack));
      },
      [](const at::Tensor&) { return std::string(); }, /*strict=*/true, /*force_outplace=*/false);
  random.restore();
  for (auto& [buffer, value] : buffers) buffer.data().copy_(value);
  flat.graph = traced.first->graph;
  EraseShapeInformation(flat.graph);
  simplify(flat.graph);
  copy_written_arguments(flat);
  check_writes(flat);
  return flat;
}

}  // namespace headroom::script
