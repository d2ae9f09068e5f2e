#include "model/script_kernels.h"

#include "ops/batch_norm.h"
#include "ops/lean_operators.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/library.h>

#include <vector>

namespace headroom::script {
namespace {

using namespace torch::jit;

// Inputs of aten::batch_norm.
constexpr std::size_t kRunningVar = 4, kTraining = 5, kMomentum = 6, kEps = 7;
// Of convolutions; the last two of aten::_convolution.
constexpr std::size_t kPadding = 4, kDilation = 5, kTransposed = 6, kGroups = 8;

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

// Whose padding is numbers, and which is not transposed.
bool is_convolution(const Node* node) {
  if (node->kind() == aten::_convolution) {
    const auto is_transposed = toIValue(node->inputs()[kTransposed]);
    return is_transposed && is_transposed->isBool() && !is_transposed->toBool();
  }
  return (node->kind() == aten::conv1d || node->kind() == aten::conv2d ||
          node->kind() == aten::conv3d) &&
         node->inputs()[kPadding]->type()->kind() == c10::TypeKind::ListType;
}

// Over dimensions that are known, in the type of its argument.
bool is_mean(const Node* node) {
  if (node->kind() != aten::mean || node->inputs().size() != 4) return false;
  const auto type = toIValue(node->inputs()[3]);
  return type && type->isNone() && node->inputs()[1]->type()->kind() == c10::TypeKind::ListType;
}

Node* create_convolution(Graph& graph, const Node* node, const ValueMap& map) {
  std::vector<Value*> inputs = mapped(node, kDilation + 1, map);
  inputs.push_back(
      mapped_at(node, node->kind() == aten::_convolution ? kGroups : kDilation + 1, map));
  return create(graph, "headroom::convolution", inputs, 1);
}

// A norm and the ReLU that alone reads it, as one node with the arguments of aten::batch_norm.
Symbol norm_with_relu() {
  static const Symbol kind = Symbol::fromQualString("headroom::batch_norm_relu");
  return kind;
}

at::Tensor run_norm_with_relu(const at::Tensor& x, const c10::optional<at::Tensor>& weight,
                              const c10::optional<at::Tensor>& bias,
                              const c10::optional<at::Tensor>& running_mean,
                              const c10::optional<at::Tensor>& running_var, bool /*training*/,
                              double momentum, double eps, bool /*cudnn_enabled*/) {
  const at::Tensor none;
  return batch_norm(x, weight.value_or(none), bias.value_or(none), running_mean.value_or(none),
                    running_var.value_or(none), momentum, eps, /*relu=*/true)
      .y;
}

TORCH_LIBRARY_FRAGMENT(headroom, library) {
  library.def(
      "batch_norm_relu(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> "
      "Tensor",
      run_norm_with_relu);
}

void join_in(Block* block) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    for (Block* inner : node->blocks()) join_in(inner);
    if (node->kind() != aten::relu && node->kind() != aten::relu_) continue;
    Node* norm = node->input()->node();
    if (norm->kind() != aten::batch_norm || !is_training_norm(norm) ||
        norm->output()->uses().size() != 1 || norm->owningBlock() != block)
      continue;
    Node* joined = node->owningGraph()->create(norm_with_relu(), norm->inputs(), 1);
    joined->insertBefore(norm);
    joined->output()->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(joined->output());
    node->destroy();
    norm->destroy();
  }
}

void replace_nodes(Block* block) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    for (Block* inner : node->blocks()) replace_nodes(inner);
    const WithInsertPoint at_node(node);
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
  if (node->kind() != aten::batch_norm && node->kind() != norm_with_relu()) return false;
  const auto uses_batch = toIValue(node->inputs()[kTraining]);
  return uses_batch && uses_batch->isBool() && uses_batch->toBool();
}

Node* create_own(Graph& graph, const Node* node, const ValueMap& map) {
  if (is_training_norm(node)) {
    std::vector<Value*> inputs = mapped(node, kRunningVar + 1, map);
    inputs.push_back(mapped_at(node, kMomentum, map));
    inputs.push_back(mapped_at(node, kEps, map));
    inputs.push_back(graph.insertConstant(node->kind() == norm_with_relu()));
    return create(graph, "headroom::batch_norm", inputs, 3);
  }
  if (node->kind() == aten::linear)
    return create(graph, "headroom::linear", mapped(node, 3, map), 1);
  if (node->kind() == aten::matmul)
    return create(graph, "headroom::matmul", mapped(node, 2, map), 1);
  if (is_mean(node)) return create(graph, "headroom::mean", mapped(node, 3, map), 1);
  if (is_convolution(node)) return create_convolution(graph, node, map);
  return nullptr;
}

Node* create_norm_again(Graph& graph, const Node* norm, const ValueMap& map, Value* mean,
                        Value* rstd) {
  std::vector<Value*> inputs = mapped(norm, kRunningVar + 1, map);
  inputs.insert(inputs.end(), {mean, rstd, mapped_at(norm, kEps, map),
                               graph.insertConstant(norm->kind() == norm_with_relu())});
  return create(graph, "headroom::batch_norm_again", inputs, 1);
}

void join_norms_with_relus(Graph& graph) { join_in(graph.block()); }

std::shared_ptr<Graph> with_own_kernels(const Graph& graph) {
  std::shared_ptr<Graph> copy = const_cast<Graph&>(graph).copy();
  join_norms_with_relus(*copy);
  replace_nodes(copy->block());
  return copy;
}

}  // namespace headroom::script
