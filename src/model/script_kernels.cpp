#include "model/script_kernels.h"

#include "ops/batch_norm.h"
#include "ops/lean_products.h"

#include <torch/csrc/jit/ir/constants.h>

#include <vector>

namespace headroom::script {
namespace {

using namespace torch::jit;

// Inputs of aten::batch_norm.
constexpr std::size_t kRunningVar = 4, kTraining = 5, kMomentum = 6, kEps = 7;

// The first of a node's inputs, in another graph.
std::vector<Value*> mapped(const Node* node, std::size_t count, const ValueMap& map) {
  std::vector<Value*> inputs;
  for (std::size_t i = 0; i < count; ++i)
    inputs.push_back(map(const_cast<Value*>(node->inputs()[i])));
  return inputs;
}

Value* mapped_at(const Node* node, std::size_t input, const ValueMap& map) {
  return map(const_cast<Value*>(node->inputs()[input]));
}

Node* create(Graph& graph, const char* name, const std::vector<Value*>& inputs,
             std::size_t num_outputs) {
  // Operators are there as soon as anything of their files is used.
  (void)reproduces_batch_norm();
  static const auto products = &lean_matmul;
  (void)products;
  return graph.create(Symbol::fromQualString(name), inputs, num_outputs);
}

void replace_nodes(Block* block) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    for (Block* inner : node->blocks()) replace_nodes(inner);
    Node* own = create_own(*node->owningGraph(), node, [](Value* value) { return value; });
    if (own == nullptr) continue;
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

Node* create_own(Graph& graph, const Node* node, const ValueMap& map) {
  if (is_training_norm(node)) {
    std::vector<Value*> inputs = mapped(node, kRunningVar + 1, map);
    inputs.push_back(mapped_at(node, kMomentum, map));
    inputs.push_back(mapped_at(node, kEps, map));
    return create(graph, "headroom::batch_norm", inputs, 3);
  }
  if (node->kind() == aten::linear)
    return create(graph, "headroom::linear", mapped(node, 3, map), 1);
  if (node->kind() == aten::matmul)
    return create(graph, "headroom::matmul", mapped(node, 2, map), 1);
  return nullptr;
}

Node* create_norm_again(Graph& graph, const Node* norm, const ValueMap& map, Value* mean,
                        Value* rstd) {
  std::vector<Value*> inputs = mapped(norm, kRunningVar + 1, map);
  inputs.insert(inputs.end(), {mean, rstd, mapped_at(norm, kEps, map)});
  return create(graph, "headroom::batch_norm_again", inputs, 1);
}

std::shared_ptr<Graph> with_own_kernels(const Graph& graph) {
  std::shared_ptr<Graph> copy = const_cast<Graph&>(graph).copy();
  replace_nodes(copy->block());
  return copy;
}

}  // namespace headroom::script
