#include "model/script_cuts.h"

#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace headroom::script {
namespace {

using namespace torch::jit;

bool is_packable(const Value* value) {
  const c10::TypePtr& type = value->type();
  return type->kind() == c10::TypeKind::IntType || type->kind() == c10::TypeKind::BoolType ||
         type->kind() == c10::TypeKind::FloatType || type->isSubtypeOf(*c10::ListType::ofInts());
}

// A value of the top level with the nodes between which it lives.
struct Lifetime {
  Value* value;
  std::size_t made;       // by this node
  std::size_t last_read;  // by this node
};

class CutFinder {
 public:
  explicit CutFinder(CutGraph& cut_graph)
      : graph_(cut_graph), block_(cut_graph.flat.graph->block()), aliases_(cut_graph.flat.graph) {
    for (Node* node : block_->nodes()) {
      if (node->kind() == prim::Constant) continue;
      index_[node] = graph_.nodes.size();
      graph_.nodes.push_back(node);
    }
    index_[block_->return_node()] = graph_.nodes.size();
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      for (Value* output : graph_.nodes[i]->outputs()) {
        std::size_t last = i;
        for (const Use& use : output->uses())
          last = std::max(last, index_.at(top_level_node(use.user)));
        if (last > i) lifetimes_.push_back({output, i, last});
      }
    }
    is_forbidden_.assign(graph_.nodes.size() + 1, false);
  }

  void run() {
    forbid_before_writes();
    forbid_inside_scopes();
    find_repeated_uses();
    std::vector<Value*> before;
    for (std::size_t position = 1; position < graph_.nodes.size(); ++position) {
      if (is_forbidden_[position]) continue;
      Cut cut;
      cut.position = position;
      if (!keeps_sums(cut) || !collect_crossing(cut) || cut.tensors.empty() ||
          cut.tensors == before)
        continue;
      before = cut.tensors;
      graph_.cuts.push_back(std::move(cut));
    }
    leave_out_impossible();
  }

 private:
  const Node* top_level_node(const Node* node) const {
    while (node->owningBlock() != block_) node = node->owningBlock()->owningNode();
    return node;
  }

  static void add_inputs(const Node* node, ValueSet& inputs) {
    inputs.insert(node->inputs().begin(), node->inputs().end());
    for (const Block* inner : node->blocks()) {
      for (const Node* each : inner->nodes()) add_inputs(each, inputs);
    }
  }

  // A boundary is read again when a stage is recomputed: nothing may have written to it by then.
  void forbid_before_writes() {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      Node* node = graph_.nodes[i];
      ValueSet inputs;
      add_inputs(node, inputs);
      if (!aliases_.writesToAlias(node, inputs)) continue;
      for (const Lifetime& lifetime : lifetimes_) {
        if (lifetime.made >= i || !aliases_.writesToAlias(node, {lifetime.value})) continue;
        for (std::size_t p = lifetime.made + 1; p <= std::min(lifetime.last_read, i); ++p)
          is_forbidden_[p] = true;
      }
    }
  }

  void forbid_inside_scopes() {
    int depth = 0;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (graph_.nodes[i]->kind() == prim::Enter) ++depth;
      if (graph_.nodes[i]->kind() == prim::Exit) --depth;
      if (depth > 0) is_forbidden_[i + 1] = true;
    }
  }

  // The nodes, in order, that give each parameter of three or more a part of its gradient.
  void find_repeated_uses() {
    const auto inputs = block_->inputs();
    for (std::size_t i = graph_.flat.num_arguments; i < inputs.size(); ++i) {
      const StateTensor* state = graph_.flat.state_of(inputs[i]);
      if (state == nullptr || !state->is_parameter) continue;
      std::vector<std::size_t> uses;
      for (const Use& use : inputs[i]->uses()) {
        if (!reads_shape_only(use.user)) uses.push_back(index_.at(top_level_node(use.user)));
      }
      std::sort(uses.begin(), uses.end());
      if (uses.size() > 2) repeated_uses_.push_back(std::move(uses));
    }
  }

  // The gradient of a parameter is summed from its last use to its first. A stage adds the sum of
  // its own uses, which is the same to the bit only while all stages but the last have one at most:
  // whoever cuts behind two uses has to cut between them.
  bool keeps_sums(Cut& cut) const {
    for (const std::vector<std::size_t>& uses : repeated_uses_) {
      if (uses.back() < cut.position) continue;
      for (std::size_t i = 1; i < uses.size() && uses[i] < cut.position; ++i) {
        if (uses[i] == uses[i - 1]) return false;
        cut.needs_cuts_in.emplace_back(uses[i - 1], uses[i]);
      }
    }
    return true;
  }

  // A cut that needs another where none is legal.
  void leave_out_impossible() {
    std::vector<Cut> all = std::exchange(graph_.cuts, {});
    graph_.cuts.reserve(all.size());  // the cuts that were made stay where they are
    std::vector<const Cut*> made;
    for (Cut& cut : all) {
      if (!may_follow(cut, made)) continue;
      graph_.cuts.push_back(std::move(cut));
      made.push_back(&graph_.cuts.back());
    }
  }

  // False when something crosses that no boundary can hold.
  bool collect_crossing(Cut& cut) {
    std::vector<Value*> others;
    for (const Lifetime& lifetime : lifetimes_) {
      if (lifetime.made >= cut.position || lifetime.last_read < cut.position) continue;
      (is_tensor(lifetime.value) ? cut.tensors : others).push_back(lifetime.value);
    }
    crossing_ = {cut.tensors.begin(), cut.tensors.end()};
    can_find_.clear();
    for (Value* value : others) {
      if (can_find_again(value)) continue;
      if (!is_packable(value) || aliases_.hasWriters(value)) return false;
      cut.numbers.push_back(value);
    }
    return true;
  }

  // Whether a value can be computed again behind the cut, from constants, arguments, state and the
  // shapes of tensors that cross anyway. What is written to is left alone: `size[0] = 0` changes a
  // list that was computed before.
  bool can_find_again(const Value* value) {
    const auto known = can_find_.find(value);
    if (known != can_find_.end()) return known->second;
    const bool result = find_again(value);
    can_find_[value] = result;
    return result;
  }

  bool find_again(const Value* value) {
    const Node* node = value->node();
    const bool is_given = node->kind() == prim::Constant || node->kind() == prim::Param;
    if (is_tensor(value)) return is_given || crossing_.count(value) != 0;
    if (aliases_.hasWriters(value)) return false;
    if (is_given) return true;
    if (!node->blocks().empty() || node->isNondeterministic() || node->hasSideEffects() ||
        node->outputs().size() != 1 || node->kind() == prim::Enter || node->kind() == prim::Exit)
      return false;
    return std::all_of(node->inputs().begin(), node->inputs().end(), [&](const Value* input) {
      return (!is_tensor(input) || reads_shape_only(node)) && can_find_again(input);
    });
  }

  CutGraph& graph_;
  Block* block_;
  AliasDb aliases_;
  std::unordered_map<const Node*, std::size_t> index_;
  std::vector<Lifetime> lifetimes_;
  std::vector<bool> is_forbidden_;  // by position
  std::vector<std::vector<std::size_t>> repeated_uses_;
  std::set<const Value*> crossing_;
  std::unordered_map<const Value*, bool> can_find_;
};

}  // namespace

CutGraph find_cuts(FlatGraph flat) {
  CutGraph graph;
  graph.flat = std::move(flat);
  CutFinder(graph).run();
  return graph;
}

bool may_follow(const Cut& cut, const std::vector<const Cut*>& made) {
  return std::all_of(cut.needs_cuts_in.begin(), cut.needs_cuts_in.end(), [&](const auto& range) {
    return std::any_of(made.begin(), made.end(), [&](const Cut* other) {
      return other->position > range.first && other->position <= range.second;
    });
  });
}

bool reads_shape_only(const Node* node) {
  static const std::set<std::string> kinds{
      "aten::size",   "aten::dim",    "aten::numel",  "aten::is_floating_point",
      "prim::device", "prim::dtype",  "prim::layout", "prim::is_cuda",
      "aten::len",    "aten::stride", "prim::is_cpu", "aten::is_complex"};
  return kinds.count(node->kind().toQualString()) != 0;
}

at::Tensor pack(const IValue& value) {
  if (value.isInt()) return torch::tensor(value.toInt(), at::kLong);
  if (value.isBool()) return torch::tensor(value.toBool(), at::kBool);
  if (value.isDouble()) return torch::tensor(value.toDouble(), at::kDouble);
  return torch::tensor(value.toIntVector(), at::kLong);
}

IValue unpack(const at::Tensor& tensor, const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::IntType:
      return tensor.item<std::int64_t>();
    case c10::TypeKind::BoolType:
      return tensor.item<bool>();
    case c10::TypeKind::FloatType:
      return tensor.item<double>();
    case c10::TypeKind::ListType:
      return std::vector<std::int64_t>(tensor.data_ptr<std::int64_t>(),
                                       tensor.data_ptr<std::int64_t>() + tensor.numel());
    default:
      return tensor;
  }
}

}  // namespace headroom::script
