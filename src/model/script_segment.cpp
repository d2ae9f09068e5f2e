#include "model/script_segment.h"

#include <headroom/core/random.h>
#include "core/torch_compat.h"
#include "model/script_kernels.h"
#include "model/script_recompute.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace headroom::script {
namespace {

using namespace torch::jit;

void gather(const IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) tensors.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const IValue& each : value.toTupleRef().elements()) gather(each, tensors);
  } else if (value.isList()) {
    for (const IValue& each : value.toListRef()) gather(each, tensors);
  } else if (value.isGenericDict()) {
    for (const auto& each : value.toGenericDict()) gather(each.value(), tensors);
  }
}

bool is_batch_norm(const Node* node) {
  return std::string_view(node->kind().toQualString()) == "aten::batch_norm" ||
         std::string_view(node->kind().toQualString()) == "aten::instance_norm";
}

// Statistics that are only kept, for evaluation, do not change what a training step computes: those
// of a norm, and a count that only counts itself up.
bool only_updates(const Use& use) {
  if (is_batch_norm(use.user) && (use.offset == 3 || use.offset == 4)) {
    const auto uses_batch = toIValue(use.user->inputs()[5]);
    return uses_batch && uses_batch->toBool();
  }
  return std::string_view(use.user->kind().toQualString()) == "aten::add_" && use.offset == 0 &&
         !use.user->output()->hasUses();
}

std::string shape_text(const at::Tensor& tensor) {
  return fmt::format("{}[{}]", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes().vec(), ","));
}

// The operations of a graph as text, with values numbered in order: equal for graphs that differ in
// names and places of the source only.
class GraphText {
 public:
  explicit GraphText(const Graph& graph) { add(graph.block()); }
  std::string text() const { return text_.str(); }

 private:
  void add(const Block* block) {
    for (const Value* input : block->inputs()) number(input);
    for (const Node* node : block->nodes()) {
      text_ << node->kind().toQualString();
      add_inputs(node);
      if (node->kind() == prim::Constant) add_constant(node->output());
      for (const Value* output : node->outputs()) number(output);
      for (const Block* inner : node->blocks()) {
        text_ << '{';
        add(inner);
        text_ << '}';
      }
      text_ << ';';
    }
    add_inputs(block->return_node());
  }

  void add_inputs(const Node* node) {
    for (const Value* input : node->inputs()) text_ << ' ' << numbers_[input];
  }

  void add_constant(const Value* value) {
    text_ << ' ' << value->type()->str() << ' ';
    const auto constant = toIValue(value);
    if (!constant) return;
    if (constant->isTensor())
      text_ << shape_text(constant->toTensor());
    else
      text_ << *constant;
  }

  void number(const Value* value) { numbers_.emplace(value, numbers_.size()); }

  std::ostringstream text_;
  std::unordered_map<const Value*, std::size_t> numbers_;
};

// Whether what is done depends on the elements of a tensor, and not on shapes alone.
bool reads_elements(const Block* block) {
  return std::any_of(block->nodes().begin(), block->nodes().end(), [](const Node* node) {
    return script::reads_elements(node) ||
           std::any_of(node->blocks().begin(), node->blocks().end(),
                       [](const Block* inner) { return reads_elements(inner); });
  });
}

}  // namespace

bool reads_elements(const Node* node) {
  static const std::set<std::string> kinds{
      "aten::Bool",           "aten::Int",           "aten::Float",      "aten::item",
      "aten::ScalarImplicit", "aten::FloatImplicit", "aten::is_nonzero", "aten::IntImplicit",
      "aten::tolist",         "prim::tolist",        "aten::nonzero"};
  return kinds.count(node->kind().toQualString()) != 0 &&
         std::any_of(node->inputs().begin(), node->inputs().end(), is_tensor);
}

OperatorExceptionsScope::OperatorExceptionsScope()
    : before_(FLAGS_torch_jit_enable_rethrow_caught_exception) {
  FLAGS_torch_jit_enable_rethrow_caught_exception = true;
}

OperatorExceptionsScope::~OperatorExceptionsScope() {
  FLAGS_torch_jit_enable_rethrow_caught_exception = before_;
}

void run_code(const Code& code, Stack& stack) {
  const OperatorExceptionsScope exceptions;
  InterpreterState(code).run(stack);
}

// Copies nodes into the segment's graph. Constants, and numbers that can be found again from
// shapes, are copied where they are first needed.
class Segment::Builder {
 public:
  Builder(const CutGraph& graph, Segment& segment) : graph_(graph), segment_(segment) {}

  void build(const Cut* from, const Cut* to) {
    if (from != nullptr) {
      std::size_t index = 0;
      for (const auto* list : {&from->tensors, &from->numbers}) {
        for (Value* value : *list) add_input(value, Source::kBoundary, index++);
      }
    }
    const std::size_t begin = from != nullptr ? from->position : 0;
    const std::size_t end = to != nullptr ? to->position : graph_.nodes.size();
    for (std::size_t i = begin; i < end; ++i) copy(graph_.nodes[i]);
    if (to == nullptr) {
      for (Value* value : graph_.flat.graph->outputs()) add_output(value);
      return;
    }
    for (const auto* list : {&to->tensors, &to->numbers}) {
      for (Value* value : *list) add_output(value);
    }
  }

 private:
  Graph& out() { return *segment_.graph_; }

  Value* add_input(Value* value, Source source, std::size_t index) {
    Value* input = out().addInput();
    input->setType(value->type());
    segment_.inputs_.push_back({source, index, value->type()});
    return map_[value] = input;
  }

  void add_output(Value* value) {
    segment_.output_is_tensor_.push_back(is_tensor(value));
    out().registerOutput(lookup(value));
  }

  void copy(Node* node) {
    Node* clone = out().createClone(node, [this](Value* value) { return lookup(value); });
    out().insertNode(clone);
    for (std::size_t i = 0; i < node->outputs().size(); ++i)
      map_[node->outputs()[i]] = clone->outputs()[i];
  }

  Value* lookup(Value* value) {
    const auto found = map_.find(value);
    if (found != map_.end()) return found->second;
    Node* node = value->node();
    if (node == graph_.flat.graph->param_node()) return add_graph_input(value);
    TORCH_INTERNAL_ASSERT(node->kind() == prim::Constant || !is_tensor(value), "value ",
                          value->debugName(), " of ", node->kind().toQualString(),
                          " does not reach its segment");
    copy(node);
    return map_.at(value);
  }

  Value* add_graph_input(Value* value) {
    const StateTensor* state = graph_.flat.state_of(value);
    if (state == nullptr) return add_input(value, Source::kArgument, value->offset());
    segment_.state_.push_back(*state);
    if (!state->is_parameter) note_buffer(value);
    return add_input(value, Source::kState, segment_.state_.size() - 1);
  }

  void note_buffer(const Value* buffer) {
    bool is_written = false;
    bool is_read = false;
    for (const Use& use : buffer->uses()) {
      const auto* schema = use.user->maybeSchema();
      const bool writes = is_batch_norm(use.user) ||
                          (schema != nullptr && use.offset < schema->arguments().size() &&
                           schema->arguments()[use.offset].alias_info() != nullptr &&
                           schema->arguments()[use.offset].alias_info()->isWrite());
      // Through a view, a list or a block it may be written to as well.
      const bool may_write = writes || !use.user->blocks().empty() || schema == nullptr ||
                             std::any_of(schema->returns().begin(), schema->returns().end(),
                                         [](const auto& each) { return each.alias_info(); });
      is_written = is_written || may_write;
      is_read = is_read || !only_updates(use);
    }
    segment_.depends_on_buffers_ = segment_.depends_on_buffers_ || (is_written && is_read);
  }

  const CutGraph& graph_;
  Segment& segment_;
  std::unordered_map<Value*, Value*> map_;
};

Segment::Segment(const CutGraph& graph, const Cut* from, const Cut* to)
    : graph_(std::make_shared<Graph>()) {
  Builder(graph, *this).build(from, to);
  graph_->lint();
  code_ = Code(with_own_kernels(*graph_), "headroom_segment");
  if (reads_elements(graph_->block())) return;
  kind_ = GraphText(*graph_).text();
  for (const StateTensor& state : state_)
    kind_ += fmt::format(" {} {} {}", shape_text(state.tensor), state.is_parameter,
                         state.tensor.requires_grad());
}

std::vector<Segment> segments_between(const CutGraph& graph, const std::vector<const Cut*>& cuts,
                                      const std::optional<Stack>& arguments) {
  std::vector<Segment> segments;
  for (std::size_t i = 0; i <= cuts.size(); ++i) {
    segments.emplace_back(graph, i == 0 ? nullptr : cuts[i - 1],
                          i < cuts.size() ? cuts[i] : nullptr);
  }
  const auto has_branches = [](const Segment& segment) {
    return std::any_of(segment.graph().nodes().begin(), segment.graph().nodes().end(),
                       [](const Node* node) { return node->kind() == prim::If; });
  };
  if (!arguments || std::none_of(segments.begin(), segments.end(), has_branches)) return segments;
  const torch::NoGradGuard no_grad;
  const RandomStateScope random(RandomState::capture());
  std::vector<at::Tensor> boundary;
  for (Segment& segment : segments) {
    segment.take_branches(boundary, *arguments);
    if (&segment != &segments.back()) boundary = segment.run_unnoticed(boundary, *arguments);
  }
  return segments;
}

void Segment::take_branches(const std::vector<at::Tensor>& boundary, const Stack& arguments) {
  std::vector<std::size_t> buffers;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].source == Source::kState && !state_[inputs_[i].index].is_parameter)
      buffers.push_back(i);
  }
  branches_ = TakenBranches::find(*graph_, stack_of(boundary, arguments), std::move(buffers));
  selective_.reset();
}

std::vector<at::Tensor> Segment::run_unnoticed(const std::vector<at::Tensor>& boundary,
                                               const Stack& arguments) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  for (const StateTensor& state : state_) {
    if (!state.is_parameter) buffers.emplace_back(state.tensor, state.tensor.clone());
  }
  std::vector<at::Tensor> outputs = run(boundary, arguments);
  for (auto& [buffer, value] : buffers) buffer.data().copy_(value);
  return outputs;
}

std::vector<std::string> Segment::options() const {
  std::vector<std::string> names{"keep"};
  for (const Selective& each : selective()) names.push_back(each.name);
  return names;
}

const std::vector<Segment::Selective>& Segment::selective() const {
  if (selective_) return *selective_;
  selective_.emplace();
  const StateOf state_of = [this](const Value* value) -> const at::Tensor* {
    const bool is_state =
        value->node()->kind() == prim::Param && inputs_[value->offset()].source == Source::kState;
    return is_state ? &state_[inputs_[value->offset()].index].tensor : nullptr;
  };
  const std::shared_ptr<Graph> graph =
      without_overwriting(branches_ ? branches_->graph() : *graph_);
  join_norms_with_relus(*graph);
  std::set<const Node*> before;
  for (const auto& [name, which] :
       {std::pair{"recompute_cheap", Recomputed::kCheap},
        std::pair{"keep_products", Recomputed::kAllButProducts},
        std::pair{"keep_weight_products", Recomputed::kAllButWeightProducts},
        std::pair{"keep_costly_products", Recomputed::kAllButCostlyProducts},
        std::pair{"keep_outputs", Recomputed::kAll}}) {
    std::set<const Node*> nodes = nodes_to_recompute(graph, which, state_of);
    if (nodes.empty() || nodes == before) continue;
    selective_->push_back({name, SelectiveCode::make(*graph, nodes)});
    before = std::move(nodes);
  }
  return *selective_;
}

Stack Segment::stack_of(const std::vector<at::Tensor>& boundary, const Stack& arguments) const {
  Stack stack;
  stack.reserve(inputs_.size());
  for (const Input& input : inputs_) {
    switch (input.source) {
      case Source::kBoundary:
        stack.push_back(unpack(boundary.at(input.index), input.type));
        break;
      case Source::kArgument:
        stack.push_back(arguments.at(input.index));
        break;
      case Source::kState:
        stack.emplace_back(state_[input.index].tensor);
        break;
    }
  }
  return stack;
}

Stack Segment::run_stack(const std::vector<at::Tensor>& boundary, const Stack& arguments,
                         int option) const {
  Stack stack = stack_of(boundary, arguments);
  // Backward runs without autocast: what it ran again would be of another type.
  const bool is_selective =
      option > 0 && at::GradMode::is_enabled() && !HEADROOM_AUTOCAST_CPU_ENABLED();
  if (is_selective && (!branches_ || branches_->are_taken_by(stack)))
    return selective().at(static_cast<std::size_t>(option - 1)).code->run(std::move(stack));
  run_code(code_, stack);
  return stack;
}

std::vector<at::Tensor> Segment::run(const std::vector<at::Tensor>& boundary,
                                     const Stack& arguments, int option) const {
  const Stack stack = run_stack(boundary, arguments, option);
  std::vector<at::Tensor> outputs;
  outputs.reserve(stack.size());
  for (std::size_t i = 0; i < stack.size(); ++i) {
    // A branch that returns early leaves values that nobody reads: they cross as undefined tensors.
    const bool is_there = !output_is_tensor_[i] || stack[i].isTensor();
    outputs.push_back(!is_there              ? at::Tensor()
                      : output_is_tensor_[i] ? stack[i].toTensor()
                                             : pack(stack[i]));
  }
  return outputs;
}

Stack Segment::run_last(const std::vector<at::Tensor>& boundary, const Stack& arguments,
                        int option) const {
  return run_stack(boundary, arguments, option);
}

std::vector<at::Tensor> tensors_of(const Stack& values) {
  std::vector<at::Tensor> tensors;
  for (const IValue& value : values) gather(value, tensors);
  return tensors;
}

}  // namespace headroom::script
