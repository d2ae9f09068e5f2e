#include "model/script_graph.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/passes/constant_propagation.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>
#include <torch/csrc/jit/passes/loop_unrolling.h>
#include <torch/csrc/jit/passes/lower_tuples.h>
#include <torch/csrc/jit/passes/peephole_list_idioms.h>
#include <torch/csrc/jit/passes/remove_mutation.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom::script {
namespace {

using namespace torch::jit;

Node* top_level_node(Node* node, const Block* block) {
  while (node->owningBlock() != block) node = node->owningBlock()->owningNode();
  return node;
}

// One use of a list that is made at the top level.
struct ListUse {
  Node* top;  // at the top level, that has the use or holds it in a block
  Use use;
  bool is_append;
};

// The uses in order, or nothing when the list is not only appended to and read.
std::optional<std::vector<ListUse>> uses_of_list(const Value* list, const Block* block) {
  std::vector<ListUse> uses;
  bool is_appended_to = false;
  for (const Use& use : list->uses()) {
    Node* top = top_level_node(use.user, block);
    const bool is_append = use.user->kind() == aten::append && use.offset == 0 && top == use.user &&
                           !use.user->output()->hasUses();
    const auto* schema = use.user->maybeSchema();
    const bool has_argument = schema != nullptr && use.offset < schema->arguments().size();
    const bool reads =
        use.user->kind() == prim::ListUnpack ||
        (has_argument && (use.user->kind() == aten::__getitem__ || use.user->kind() == aten::len ||
                          schema->arguments()[use.offset].alias_info() == nullptr));
    if (!is_append && !reads) return std::nullopt;
    is_appended_to = is_appended_to || is_append;
    uses.push_back({top, use, is_append});
  }
  if (!is_appended_to) return std::nullopt;
  std::stable_sort(uses.begin(), uses.end(), [](const ListUse& a, const ListUse& b) {
    return a.top != b.top && a.top->isBefore(b.top);
  });
  return uses;
}

// Gives a reader what the list holds at its place.
void resolve_read(Graph& graph, const Use& use, const std::vector<Value*>& holds) {
  Node* user = use.user;
  const auto number =
      user->kind() == aten::__getitem__ ? toIValue(user->inputs()[1]) : c10::nullopt;
  if (!number) {
    Node* list = graph.createList(c10::TensorType::get(), holds);
    user->replaceInput(use.offset, graph.insertNode(list)->output());
    return;
  }
  const auto size = static_cast<std::int64_t>(holds.size());
  const std::int64_t index = number->toInt() < 0 ? number->toInt() + size : number->toInt();
  if (index >= 0 && index < size)  // otherwise the read raises, as it would have
    user->output()->replaceAllUsesWith(holds[static_cast<std::size_t>(index)]);
}

// RemoveListMutation gives up as soon as anything lies between two appends. This follows lists of
// tensors that are made and appended to at the top level: constant indices and lengths are
// resolved, and other readers get a list of what it holds at that point.
void follow_lists(const std::shared_ptr<Graph>& graph, bool lengths_only) {
  Block* block = graph->block();
  std::vector<Node*> lists;
  for (Node* node : block->nodes()) {
    if (node->kind() == prim::ListConstruct &&
        node->output()->type()->isSubtypeOf(*c10::ListType::ofTensors()))
      lists.push_back(node);
  }
  for (Node* list : lists) {
    const auto uses = uses_of_list(list->output(), block);
    if (!uses) continue;
    std::vector<Value*> holds(list->inputs().begin(), list->inputs().end());
    for (const ListUse& each : *uses) {
      const WithInsertPoint here(each.top);
      Node* user = each.use.user;
      if (each.is_append) {
        holds.push_back(user->inputs()[1]);
        if (!lengths_only) user->destroy();
      } else if (user->kind() == aten::len) {
        user->output()->replaceAllUsesWith(
            graph->insertConstant(static_cast<std::int64_t>(holds.size())));
      } else if (!lengths_only) {
        resolve_read(*graph, each.use, holds);
      }
    }
  }
}

// What a dictionary holds: names with their constants, and values, in the order of their names.
using Holds = std::vector<std::pair<Value*, Value*>>;

std::string name_in(const Value* key) { return toIValue(key)->toStringRef(); }

void hold(Holds& holds, Value* key, Value* value) {
  const auto known = std::find_if(holds.begin(), holds.end(), [&](const auto& each) {
    return name_in(each.first) == name_in(key);
  });
  if (known == holds.end())
    holds.emplace_back(key, value);
  else
    known->second = value;
}

bool sets_item(const Use& use) {
  return use.user->kind() == aten::_set_item && use.offset == 0 &&
         toIValue(use.user->inputs()[1]).has_value();
}

// Whether a dictionary is only set at the top level, to constant names, and read.
bool is_plain_dictionary(const Value* dictionary, const Block* block) {
  return std::all_of(dictionary->uses().begin(), dictionary->uses().end(), [&](const Use& use) {
    if (sets_item(use)) return use.user->owningBlock() == block;
    if (use.user == block->return_node()) return true;
    const auto* schema = use.user->maybeSchema();
    return schema != nullptr && use.offset < schema->arguments().size() &&
           (use.user->kind() == aten::__getitem__ ||
            schema->arguments()[use.offset].alias_info() == nullptr);
  });
}

void resolve_dictionary(Graph& graph, Node* dictionary) {
  Block* block = graph.block();
  std::vector<std::pair<Node*, Use>> uses;  // with the node of the top level that has the use
  for (const Use& use : dictionary->output()->uses())
    uses.emplace_back(top_level_node(use.user, block), use);
  std::stable_sort(uses.begin(), uses.end(), [](const auto& a, const auto& b) {
    return a.first != b.first && a.first->isBefore(b.first);
  });
  Holds holds;
  for (const auto& [top, use] : uses) {
    Node* user = use.user;
    if (sets_item(use)) {
      hold(holds, user->inputs()[1], user->inputs()[2]);
      user->destroy();
      continue;
    }
    const auto key = user->kind() == aten::__getitem__ ? toIValue(user->inputs()[1]) : c10::nullopt;
    const auto found = std::find_if(holds.begin(), holds.end(), [&](const auto& each) {
      return key && name_in(each.first) == key->toStringRef();
    });
    if (found != holds.end()) {
      user->output()->replaceAllUsesWith(found->second);
      continue;
    }
    std::vector<Value*> keys, values;
    for (const auto& [name, value] : holds) {
      keys.push_back(name);
      values.push_back(value);
    }
    const auto type = dictionary->output()->type()->expect<c10::DictType>();
    Node* copy = graph.createDict(type->getKeyType(), type->getValueType(), keys, values);
    copy->insertBefore(top);
    user->replaceInput(use.offset, copy->output());
  }
}

// The same for dictionaries of tensors that begin empty, as models with several outputs fill them:
// one that is filled from the first layer to the last would cross every cut.
void follow_dictionaries(const std::shared_ptr<Graph>& graph) {
  std::vector<Node*> dictionaries;
  for (Node* node : graph->nodes()) {
    const bool is_made = node->kind() == aten::dict || node->kind() == prim::DictConstruct;
    if (!is_made || !node->inputs().empty()) continue;
    const auto type = node->output()->type()->cast<c10::DictType>();
    if (type && type->getKeyType()->kind() == c10::TypeKind::StringType &&
        type->getValueType()->isSubtypeOf(*c10::TensorType::get()))
      dictionaries.push_back(node);
  }
  for (Node* dictionary : dictionaries) {
    if (is_plain_dictionary(dictionary->output(), graph->block()))
      resolve_dictionary(*graph, dictionary);
  }
}

// A random operation whose value nobody reads draws its numbers all the same, and those after it
// would be others without it. A node with a side effect reads it until the graph is simple.
const Symbol kReadsRandom = Symbol::attr("reads_random");

void keep_random_operations(Block* block) {
  for (Node* node : block->nodes()) {
    for (Block* inner : node->blocks()) keep_random_operations(inner);
    if (!node->isNondeterministic() || node->outputs().empty()) continue;
    Node* reader = block->owningGraph()->create(prim::Print, {node->output(0)}, /*num_outputs=*/0);
    reader->i_(kReadsRandom, 1);
    reader->insertAfter(node);
  }
}

void drop_readers(Block* block) {
  for (auto node = block->nodes().begin(); node != block->nodes().end(); ++node) {
    for (Block* inner : node->blocks()) drop_readers(inner);
    if (node->kind() == prim::Print && node->hasAttribute(kReadsRandom)) node.destroyCurrent();
  }
}

}  // namespace

// Common subexpressions, tensor peepholes, removal of tensor mutation and freezing are left out:
// they change autograd's graph, or what it keeps.
void simplify(std::shared_ptr<Graph>& graph) {
  keep_random_operations(graph->block());
  constexpr int kNumRounds = 3;  // unrolling a loop shows list lengths, which unroll the next one
  for (int round = 0; round < kNumRounds; ++round) {
    ConstantPropagation(graph);  // parameters are inputs, and so are never folded
    UnrollConstantLoops(graph);
    RemoveListMutation(graph);
    PeepholeOptimizeListIdioms(graph, /*refine_list_len=*/true);
    LowerSimpleTuples(graph);
    follow_lists(graph, true);
    ConstantPropagation(graph);
    follow_lists(graph, false);
    follow_dictionaries(graph);
  }
  ConstantPropagation(graph);
  EliminateDeadCode(graph);  // keeps writes to inputs of the graph: buffers
  drop_readers(graph->block());
  graph->lint();
}

}  // namespace headroom::script
