#include "model/script_branches.h"

#include <headroom/core/random.h>
#include "model/script_cuts.h"
#include "model/script_segment.h"

#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace headroom::script {
namespace {

using namespace torch::jit;

// Whether values of a graph's top level depend on elements of tensors.
class ValueDependence {
 public:
  bool of(const Value* value) {
    const auto known = known_.find(value);
    if (known != known_.end()) return known->second;
    known_[value] = true;  // should it depend on itself
    return known_[value] = depends(value->node());
  }

 private:
  bool depends(const Node* node) {
    if (node->kind() == prim::Param) return false;
    if (node->kind() == prim::Loop || node->hasSideEffects() || gives_values(node)) return true;
    const bool by_inputs = std::any_of(node->inputs().begin(), node->inputs().end(),
                                       [this](const Value* input) { return of(input); });
    return by_inputs ||
           std::any_of(node->blocks().begin(), node->blocks().end(), [this](const Block* block) {
             return std::any_of(block->nodes().begin(), block->nodes().end(),
                                [this](const Node* inner) { return depends(inner); });
           });
  }

  // Operations that give elements of a tensor as numbers, or tensors of a shape that depends on
  // elements. Whether something requires a gradient is a matter of how it is run.
  static bool gives_values(const Node* node) {
    static const std::set<std::string> shapes{
        "aten::masked_select", "aten::unique_dim",    "aten::_unique2", "aten::unique_consecutive",
        "aten::argwhere",      "aten::nonzero_numpy", "aten::bincount", "aten::repeat_interleave",
        "aten::one_hot",       "prim::requires_grad"};
    const std::string kind = node->kind().toQualString();
    if (reads_elements(node) || shapes.count(kind) != 0) return true;
    // A mask as index gives as many elements as it has; the model's own tensors stay what they are.
    return kind == "aten::index" &&
           !std::all_of(node->inputs()[1]->node()->inputs().begin(),
                        node->inputs()[1]->node()->inputs().end(), [](const Value* index) {
                          return index->node()->kind() == prim::Param ||
                                 index->node()->kind() == prim::Constant;
                        });
  }

  std::unordered_map<const Value*, bool> known_;
};

void take_branch(Node* node, bool is_true) {
  Block* taken = node->blocks()[is_true ? 0 : 1];
  const std::vector<Node*> nodes(taken->nodes().begin(), taken->nodes().end());
  for (Node* each : nodes) each->moveBefore(node);
  for (std::size_t i = 0; i < node->outputs().size(); ++i)
    node->outputs()[i]->replaceAllUsesWith(taken->outputs()[i]);
  node->destroy();
}

std::vector<Node*> branches_of(const Graph& graph) {
  ValueDependence dependence;
  std::vector<Node*> branches;
  for (const Node* node : graph.nodes()) {
    if (node->kind() == prim::If && !dependence.of(node->input()))
      branches.push_back(const_cast<Node*>(node));
  }
  return branches;
}

std::vector<std::int64_t> shapes_of(const Stack& inputs) {
  std::vector<std::int64_t> shapes;
  for (const IValue& input : inputs) {
    if (input.isTensor() && input.toTensor().defined()) {
      const at::IntArrayRef sizes = input.toTensor().sizes();
      shapes.push_back(static_cast<std::int64_t>(input.toTensor().scalar_type()));
      shapes.insert(shapes.end(), sizes.begin(), sizes.end());
    } else if (input.isInt()) {
      shapes.push_back(input.toInt());
    }
    shapes.push_back(-1);  // the next one
  }
  return shapes;
}

// The values of a graph's outputs from `first_output` on; nothing where such inputs do not get that
// far. `written` inputs are copied.
std::vector<bool> decide(const Graph& graph, std::size_t first_output, const Stack& inputs,
                         const std::vector<std::size_t>& written) {
  const std::shared_ptr<Graph> deciding = const_cast<Graph&>(graph).copy();
  for (std::size_t i = 0; i < first_output; ++i) deciding->eraseOutput(0);
  EliminateDeadCode(deciding);
  const torch::NoGradGuard no_grad;
  const RandomStateScope random(RandomState::capture());
  Stack stack = inputs;
  for (const std::size_t index : written) stack[index] = stack[index].toTensor().detach().clone();
  try {
    run_code(Code(deciding, "headroom_branches"), stack);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception&) {
    return {};
  }
  std::vector<bool> decided;
  for (const IValue& value : stack) decided.push_back(value.toBool());
  return decided;
}

}  // namespace

std::shared_ptr<const TakenBranches> TakenBranches::find(const Graph& graph, const Stack& inputs,
                                                         std::vector<std::size_t> written) {
  const std::shared_ptr<TakenBranches> taken(new TakenBranches());
  taken->written_ = std::move(written);
  taken->deciding_ = const_cast<Graph&>(graph).copy();
  Graph& deciding = *taken->deciding_;
  const std::size_t num_outputs = deciding.outputs().size();
  taken->num_outputs_ = num_outputs;
  for (std::vector<Node*> branches = branches_of(deciding); !branches.empty();
       branches = branches_of(deciding)) {
    const std::size_t first = deciding.outputs().size();
    // As outputs they stay known when what gives them is replaced.
    for (Node* branch : branches) deciding.registerOutput(branch->input());
    const std::vector<bool> is_true = decide(deciding, first, inputs, taken->written_);
    if (is_true.empty()) return nullptr;
    for (std::size_t i = 0; i < branches.size(); ++i) take_branch(branches[i], is_true[i]);
    taken->is_true_.insert(taken->is_true_.end(), is_true.begin(), is_true.end());
  }
  if (taken->is_true_.empty()) return nullptr;
  deciding.lint();
  taken->graph_ = deciding.copy();
  while (taken->graph_->outputs().size() > num_outputs) taken->graph_->eraseOutput(num_outputs);
  taken->known_[shapes_of(inputs)] = true;
  return taken;
}

bool TakenBranches::are_taken_by(const Stack& inputs) const {
  std::vector<std::int64_t> shapes = shapes_of(inputs);
  const auto known = known_.find(shapes);
  if (known != known_.end()) return known->second;
  return known_[std::move(shapes)] = decide(*deciding_, num_outputs_, inputs, written_) == is_true_;
}

}  // namespace headroom::script
