#include "model/script_recompute.h"

#include "model/script_graph.h"
#include "model/script_kernels.h"

#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace headroom::script {
namespace {

using namespace torch::jit;

// An operation that may be run again.
struct OperationTraits {
  Recomputed from;  // the first level at which it is
  // Backward needs nothing of its inputs: keeping its result is no worse than keeping an input.
  bool forgets_inputs = false;
  bool is_view = false;  // gives no memory of its own
};

constexpr OperationTraits kPointwise{Recomputed::kCheap};
constexpr OperationTraits kOfResult{Recomputed::kCheap, true};
constexpr OperationTraits kView{Recomputed::kCheap, false, true};
constexpr OperationTraits kOther{Recomputed::kAllButProducts};
constexpr OperationTraits kOtherOfResult{Recomputed::kAllButProducts, true};
constexpr OperationTraits kProduct{Recomputed::kAllButWeightProducts};

// By name, without the trailing "_" of those that write in place. Whatever is not here is kept:
// products, convolutions, recurrent layers, random numbers, and operations that nobody has looked
// at.
const std::map<std::string, OperationTraits>& operation_table() {
  static const std::map<std::string, OperationTraits> table = [] {
    std::map<std::string, OperationTraits> rows;
    const auto add = [&](const OperationTraits& traits, std::initializer_list<const char*> names) {
      for (const char* name : names) rows.emplace(name, traits);
    };
    add(kPointwise, {"aten::mul",
                     "aten::div",
                     "aten::pow",
                     "aten::silu",
                     "aten::gelu",
                     "aten::hardswish",
                     "aten::hardtanh",
                     "aten::relu6",
                     "aten::leaky_relu",
                     "aten::elu",
                     "aten::abs",
                     "aten::clamp",
                     "aten::softplus",
                     "aten::mish",
                     "aten::square",
                     "aten::log",
                     "aten::where",
                     "aten::masked_fill",
                     "aten::minimum",
                     "aten::maximum",
                     "aten::batch_norm",
                     "aten::layer_norm",
                     "aten::group_norm",
                     "aten::prelu",
                     "aten::erf",
                     "aten::sin",
                     "aten::cos",
                     "aten::addcmul",
                     "aten::addcdiv",
                     "aten::to",
                     "aten::type_as",
                     "aten::hardsigmoid",
                     "aten::celu",
                     "aten::selu",
                     "aten::log_sigmoid",
                     "aten::lerp",
                     "headroom::batch_norm_relu"});
    add(kOfResult, {"aten::add", "aten::sub", "aten::rsub", "aten::neg", "aten::relu", "aten::tanh",
                    "aten::sigmoid", "aten::exp", "aten::sqrt", "aten::rsqrt", "aten::clone",
                    "aten::contiguous"});
    add(kView, {"aten::view",          "aten::reshape",
                "aten::flatten",       "aten::transpose",
                "aten::permute",       "aten::unsqueeze",
                "aten::squeeze",       "aten::select",
                "aten::slice",         "aten::t",
                "aten::expand",        "aten::expand_as",
                "aten::narrow",        "aten::chunk",
                "aten::split",         "aten::unbind",
                "aten::view_as",       "aten::numpy_T",
                "aten::detach",        "prim::ListUnpack",
                "prim::TupleUnpack",   "prim::ListConstruct",
                "prim::TupleConstruct"});
    add(kOther, {"aten::cat",
                 "aten::stack",
                 "aten::max_pool2d",
                 "aten::avg_pool2d",
                 "aten::adaptive_avg_pool2d",
                 "aten::adaptive_max_pool2d",
                 "aten::embedding",
                 "aten::index_select",
                 "aten::gather",
                 "aten::roll",
                 "aten::pad",
                 "aten::constant_pad_nd",
                 "aten::upsample_nearest2d",
                 "aten::upsample_bilinear2d",
                 "aten::repeat",
                 "aten::cumsum",
                 "aten::norm",
                 "aten::var",
                 "aten::std",
                 "aten::tril",
                 "aten::triu",
                 "aten::flip",
                 "aten::repeat_interleave"});
    add(kProduct,
        {"aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution", "aten::linear",
         "aten::matmul", "aten::bmm", "aten::baddbmm", "aten::addmm", "aten::mm"});
    add(kOtherOfResult, {"aten::softmax", "aten::log_softmax", "aten::sum", "aten::mean"});
    return rows;
  }();
  return table;
}

const OperationTraits* traits_of(const Node* node) {
  std::string name = node->kind().toQualString();
  if (name.size() > 1 && name.back() == '_' && name.rfind("aten::__", 0) != 0) name.pop_back();
  const auto found = operation_table().find(name);
  return found == operation_table().end() ? nullptr : &found->second;
}

bool is_product(const OperationTraits* traits) {
  return traits->from == Recomputed::kAllButWeightProducts;
}

std::vector<Value*> written_arguments(const Node* node) {
  std::vector<Value*> written;
  const auto* schema = node->maybeSchema();
  for (std::size_t i = 0; schema != nullptr && i < schema->arguments().size(); ++i) {
    const auto* alias = schema->arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && i < node->inputs().size())
      written.push_back(const_cast<Value*>(node->inputs()[i]));
  }
  for (const Block* block : node->blocks()) {
    for (const Node* inner : block->nodes()) {
      const std::vector<Value*> more = written_arguments(inner);
      written.insert(written.end(), more.begin(), more.end());
    }
  }
  return written;
}

class Chooser {
 public:
  Chooser(const std::shared_ptr<Graph>& graph, const StateOf& state_of)
      : graph_(*graph), state_of_(state_of), aliases_(graph) {
    for (Node* node : graph_.nodes()) {
      if (node->kind() == prim::Constant) continue;
      position_[node] = nodes_.size();
      nodes_.push_back(node);
      most_work_ = std::max(most_work_, work_per_element(node));
    }
  }

  std::set<const Node*> run(Recomputed which) {
    for (const Node* node : nodes_) {
      if (may_run_again(node, which)) chosen_.insert(node);
    }
    if (!note_writes()) return {};
    leave_out_outputs();
    // Each rule may take away what another relied on.
    for (std::size_t before = 0; before != chosen_.size();) {
      before = chosen_.size();
      leave_out_half_written();
      leave_out_what_saves_nothing();
    }
    const bool gains = std::any_of(chosen_.begin(), chosen_.end(),
                                   [](const Node* node) { return !traits_of(node)->is_view; });
    return gains ? chosen_ : std::set<const Node*>{};
  }

 private:
  struct Write {
    const Node* writer;
    std::vector<const Value*> memory;  // every value of the top level that may share it
  };

  bool may_run_again(const Node* node, Recomputed which) const {
    const OperationTraits* traits = traits_of(node);
    if (traits == nullptr || traits->from > which || node->isNondeterministic()) return false;
    const bool gives_tensors =
        std::any_of(node->outputs().begin(), node->outputs().end(), [](const Value* value) {
          return is_tensor(value) || value->type()->isSubtypeOf(*c10::ListType::ofTensors());
        });
    if (!gives_tensors) return false;
    for (const Value* input : node->inputs()) {  // a list may be another one by then
      if (input->type()->kind() == c10::TypeKind::ListType && aliases_.hasWriters(input))
        return false;
    }
    if (is_product(traits)) {
      if (which == Recomputed::kAll) return true;
      constexpr double kCheapShare = 1.0 / 3;
      const double work = work_per_element(node);
      if (work == 0) return multiplies_activations(node);
      return which == Recomputed::kAllButCostlyProducts && work <= kCheapShare * most_work_;
    }
    return node->kind() != aten::batch_norm || is_training_norm(node);
  }

  // Multiplications for one element of the result, of a product with weights as its second
  // argument: (outputs, inputs, ...). 0 for other nodes.
  double work_per_element(const Node* node) const {
    const OperationTraits* traits = traits_of(node);
    if (traits == nullptr || !is_product(traits)) return 0;
    const at::Tensor* weight = node->inputs().size() > 1 ? state_of_(node->inputs()[1]) : nullptr;
    if (weight == nullptr || weight->dim() < 2) return 0;
    return static_cast<double>(weight->numel()) / static_cast<double>(weight->size(0));
  }

  // A view of a weight counts as an activation of nobody: the product is kept.
  bool multiplies_activations(const Node* node) const {
    return std::all_of(node->inputs().begin(), node->inputs().end(), [&](const Value* value) {
      if (!is_tensor(value)) return true;
      while (traits_of(value->node()) != nullptr && traits_of(value->node())->is_view)
        value = value->node()->inputs()[0];
      return state_of_(value) == nullptr;
    });
  }

  // False when memory is written to that belongs to others, or to nobody knows whom.
  bool note_writes() {
    for (const Node* node : nodes_) {
      if (node->kind() == prim::Enter || node->kind() == prim::Exit) return false;
      for (Value* written : written_arguments(node)) {
        if (state_of_(written) != nullptr) {
          written_state_.insert(written);
          chosen_.erase(node);
          continue;
        }
        for (const Value* input : graph_.inputs()) {
          if (aliases_.mayAlias(written, input)) return false;
        }
        Write write{node, {}};
        for (Node* maker : nodes_) {
          for (Value* value : maker->outputs()) {
            if (aliases_.mayContainAlias(value, written)) write.memory.push_back(value);
          }
        }
        writes_.push_back(std::move(write));
      }
    }
    for (const Value* state : written_state_) {
      for (const Use& use : state->uses()) {
        const bool keeps_statistics =
            is_training_norm(use.user) && (use.offset == 3 || use.offset == 4);
        if (!keeps_statistics) chosen_.erase(use.user);
      }
    }
    return true;
  }

  // The stage's outputs are in memory until backward.
  void leave_out_outputs() {
    for (Node* node : nodes_) {
      if (chosen_.count(node) == 0) continue;
      for (Value* value : node->outputs()) {
        for (Value* output : graph_.outputs()) {
          if (aliases_.mayContainAlias(value, output)) chosen_.erase(node);
        }
      }
    }
  }

  // Memory is made anew by running again all that made it and wrote to it; otherwise none of that
  // is run again, nor whatever read it before the last write.
  void leave_out_half_written() {
    for (const Write& write : writes_) {
      bool is_whole = chosen_.count(write.writer) != 0;
      for (const Value* value : write.memory)
        is_whole = is_whole && chosen_.count(value->node()) != 0;
      if (is_whole) continue;
      chosen_.erase(write.writer);
      for (const Value* value : write.memory) {
        chosen_.erase(value->node());
        for (const Use& use : value->uses()) {
          const auto found = position_.find(use.user);
          if (found != position_.end() && found->second < position_.at(write.writer))
            chosen_.erase(use.user);
        }
      }
    }
  }

  // To drop a result that could be kept in place of an input brings nothing.
  void leave_out_what_saves_nothing() {
    for (Node* node : nodes_) {
      if (chosen_.count(node) == 0 || !traits_of(node)->forgets_inputs) continue;
      for (const Value* input : node->inputs()) {
        if (is_tensor(input) && is_kept_for_this(input)) {
          chosen_.erase(node);
          break;
        }
      }
    }
  }

  // Whether the value would be kept for one reader alone.
  bool is_kept_for_this(const Value* value) const {
    while (value->uses().size() == 1 && value->node()->outputs().size() == 1) {
      const Node* maker = value->node();
      if (maker->kind() == prim::Param || maker->kind() == prim::Constant) return false;
      if (chosen_.count(maker) == 0) return true;
      if (!traits_of(maker)->is_view || maker->inputs().empty()) return false;
      value = maker->inputs()[0];
    }
    return false;
  }

  Graph& graph_;
  const StateOf& state_of_;
  AliasDb aliases_;
  double most_work_ = 0;  // of any product with weights
  std::vector<Node*> nodes_;
  std::unordered_map<const Node*, std::size_t> position_;
  std::set<const Node*> chosen_;
  std::set<const Value*> written_state_;
  std::vector<Write> writes_;
};

}  // namespace

bool is_recomputable(const Value* value) {
  const OperationTraits* traits = traits_of(value->node());
  return traits != nullptr && !is_product(traits) && !value->node()->isNondeterministic();
}

std::shared_ptr<Graph> without_overwriting(const Graph& graph) {
  static const std::map<std::string, const char*> kinds{{"aten::silu_", "aten::silu"},
                                                        {"aten::hardswish_", "aten::hardswish"},
                                                        {"aten::hardtanh_", "aten::hardtanh"},
                                                        {"aten::leaky_relu_", "aten::leaky_relu"},
                                                        {"aten::elu_", "aten::elu"}};
  // What these give is in memory of its own.
  static const std::set<std::string> makers{"aten::batch_norm", "aten::layer_norm",
                                            "aten::group_norm", "aten::add",
                                            "aten::mul",        "aten::conv2d"};
  std::shared_ptr<Graph> copy = const_cast<Graph&>(graph).copy();
  std::vector<std::pair<Node*, const char*>> found;
  for (Node* node : copy->nodes()) {
    const auto kind = kinds.find(node->kind().toQualString());
    if (kind == kinds.end()) continue;
    const Value* input = node->inputs()[0];
    if (input->uses().size() == 1 && makers.count(input->node()->kind().toQualString()) != 0)
      found.emplace_back(node, kind->second);
  }
  for (const auto& [node, kind] : found) {
    Node* plain = copy->create(Symbol::fromQualString(kind), node->inputs(), 1);
    plain->insertBefore(node);
    plain->output()->copyMetadata(node->output());
    node->output()->replaceAllUsesWith(plain->output());
    node->destroy();
  }
  return copy;
}

std::set<const Node*> nodes_to_recompute(const std::shared_ptr<Graph>& graph, Recomputed which,
                                         const StateOf& state_of) {
  return Chooser(graph, state_of).run(which);
}

}  // namespace headroom::script
