#include "model/script_norm.h"

#include "ops/batch_norm.h"

#include <torch/csrc/jit/ir/constants.h>

#include <vector>

namespace headroom::script {
namespace {

using namespace torch::jit;

// Inputs of aten::batch_norm.
constexpr std::size_t kRunningVar = 4, kTraining = 5, kMomentum = 6, kEps = 7;

// x, weight, bias and the running statistics.
std::vector<Value*> tensors_of(const Node* norm, const ValueMap& map) {
  std::vector<Value*> tensors;
  for (std::size_t i = 0; i <= kRunningVar; ++i)
    tensors.push_back(map(const_cast<Value*>(norm->inputs()[i])));
  return tensors;
}

Value* mapped(const Node* norm, std::size_t input, const ValueMap& map) {
  return map(const_cast<Value*>(norm->inputs()[input]));
}

// Names an operator of ours, which is there as soon as anything of its file is used.
Node* create(Graph& graph, const char* name, const std::vector<Value*>& inputs,
             std::size_t num_outputs) {
  (void)reproduces_batch_norm();
  return graph.create(Symbol::fromQualString(name), inputs, num_outputs);
}

void replace_norms(Block* block) {
  std::vector<Node*> norms;
  for (Node* node : block->nodes()) {
    for (Block* inner : node->blocks()) replace_norms(inner);
    if (is_training_norm(node)) norms.push_back(node);
  }
  for (Node* node : norms) {
    Node* own = create_norm(*node->owningGraph(), node, [](Value* value) { return value; });
    own->insertBefore(node);
    own->output(0)->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(own->output(0));
    node->destroy();
  }
}

}  // namespace

bool is_training_norm(const Node* node) {
  if (node->kind() != aten::batch_norm) return false;
  const auto uses_batch = toIValue(node->inputs()[kTraining]);
  return uses_batch && uses_batch->isBool() && uses_batch->toBool();
}

Node* create_norm(Graph& graph, const Node* norm, const ValueMap& map) {
  std::vector<Value*> inputs = tensors_of(norm, map);
  inputs.push_back(mapped(norm, kMomentum, map));
  inputs.push_back(mapped(norm, kEps, map));
  return create(graph, "headroom::batch_norm", inputs, 3);
}

Node* create_norm_again(Graph& graph, const Node* norm, const ValueMap& map, Value* mean,
                        Value* rstd) {
  std::vector<Value*> inputs = tensors_of(norm, map);
  inputs.insert(inputs.end(), {mean, rstd, mapped(norm, kEps, map)});
  return create(graph, "headroom::batch_norm_again", inputs, 1);
}

std::shared_ptr<Graph> with_own_norms(const Graph& graph) {
  std::shared_ptr<Graph> copy = const_cast<Graph&>(graph).copy();
  replace_norms(copy->block());
  return copy;
}

}  // namespace headroom::script
