#include "model/script_costs.h"

#include <headroom/core/random.h>
#include "core/engine.h"
#include "model/script_recompute.h"
#include "model/script_segment.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_map>

namespace headroom::script {
namespace {

using namespace torch::jit;

// What lies between two neighbouring legal cuts.
struct Piece {
  double work = 0;   // operations
  double bytes = 0;  // of the tensors that it makes
};

struct GraphCosts {
  std::vector<Piece> pieces;  // one more than there are cuts
  std::unordered_map<const Value*, double> bytes_of;
  std::set<const Value*> saved;  // autograd keeps their memory for backward
};

std::size_t begin_of(const CutGraph& graph, std::size_t piece) {
  return piece == 0 ? 0 : graph.cuts[piece - 1].position;
}
std::size_t end_of(const CutGraph& graph, std::size_t piece) {
  return piece < graph.cuts.size() ? graph.cuts[piece].position : graph.nodes.size();
}

GraphCosts count_nodes(const CutGraph& graph) {
  GraphCosts costs;
  for (std::size_t i = 0; i <= graph.cuts.size(); ++i) {
    const auto count = static_cast<double>(end_of(graph, i) - begin_of(graph, i));
    costs.pieces.push_back({count, count});
  }
  for (const Cut& cut : graph.cuts) {
    for (const Value* value : cut.tensors) {
      costs.bytes_of[value] = 1;
      costs.saved.insert(value);  // nothing is known of it
    }
  }
  return costs;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

// Notes the memory of every tensor that autograd saves while it lives. What is saved cannot be read
// again: nothing can be differentiated.
class SavedMemory final : public SavedTensorHookSource {
 public:
  bool holds(const at::Tensor& tensor) const { return storages_.count(storage_of(tensor)) != 0; }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }

 private:
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(SavedMemory& memory) : memory_(memory) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      memory_.storages_.insert(storage_of(tensor));
      memory_.tensors_.push_back(tensor.detach());  // no other memory may get the same address
    }
    at::Tensor call_unpack_hook() override { TORCH_CHECK(false, "nothing was kept"); }

   private:
    SavedMemory& memory_;
  };

  std::set<const void*> storages_;
  std::vector<at::Tensor> tensors_;
  SavedTensorHookScope scope_{this};
};

// Adds up multiplications of products and convolutions while it lives.
class WorkCounter {
 public:
  WorkCounter() {
    current_work = 0;
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&WorkCounter::on_operation, &WorkCounter::on_end)
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~WorkCounter() { at::removeCallback(callback_); }
  WorkCounter(const WorkCounter&) = delete;
  WorkCounter& operator=(const WorkCounter&) = delete;

  double work() const { return current_work; }

 private:
  static std::unique_ptr<at::ObserverContext> on_operation(const at::RecordFunction& operation) {
    const std::string_view name = operation.name();
    const c10::ArrayRef<const IValue> inputs = inputs_of(operation);
    if (name == "headroom::convolution") {  // which may call LibTorch's
      current_work += convolution_work(inputs);
      is_in_convolution = true;
    } else if (name == "aten::convolution") {
      if (!is_in_convolution) current_work += convolution_work(inputs);
    } else if (name == "aten::mm" || name == "aten::bmm") {
      current_work += product_work(inputs, 0);
    } else if (name == "aten::addmm" || name == "aten::baddbmm") {
      current_work += product_work(inputs, 1);
    }
    return nullptr;
  }

  static void on_end(const at::RecordFunction& operation, at::ObserverContext* /*context*/) {
    if (std::string_view(operation.name()) == "headroom::convolution") is_in_convolution = false;
  }

  // Where a graph is interpreted, its stack may have other values in front.
  static c10::ArrayRef<const IValue> inputs_of(const at::RecordFunction& operation) {
    const c10::ArrayRef<const IValue> stack = operation.inputs();
    return stack.slice(stack.size() - std::min(stack.size(), operation.num_inputs()));
  }

  static double product_work(c10::ArrayRef<const IValue> inputs, std::size_t first) {
    if (inputs.size() < first + 2 || !inputs[first].isTensor() || !inputs[first + 1].isTensor())
      return 0;
    const at::Tensor &left = inputs[first].toTensor(), &right = inputs[first + 1].toTensor();
    // What an operation of LibTorch's own hands on by moving it is not there to be looked at.
    if (!left.defined() || !right.defined() || right.dim() == 0) return 0;
    return static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
  }

  // Each place of the output, or of the input of a transposed one, meets every weight.
  static double convolution_work(c10::ArrayRef<const IValue> inputs) {
    if (inputs.size() < 7 || !inputs[0].isTensor() || !inputs[1].isTensor()) return 0;
    const at::Tensor& input = inputs[0].toTensor();
    double places = input.dim() > 2 ? static_cast<double>(input.size(0)) : 1;
    for (std::int64_t i = 2; i < input.dim(); ++i) places *= static_cast<double>(input.size(i));
    const bool is_transposed = inputs[6].isBool() && inputs[6].toBool();
    if (!is_transposed && inputs[3].isIntList()) {
      for (const std::int64_t stride : inputs[3].toIntVector())
        places /= static_cast<double>(stride);
    }
    return places * static_cast<double>(inputs[1].toTensor().numel());
  }

  static thread_local double current_work;
  static thread_local bool is_in_convolution;
  at::CallbackHandle callback_;
};

thread_local double WorkCounter::current_work = 0;
thread_local bool WorkCounter::is_in_convolution = false;

// Runs the graph piece by piece and notes the bytes of every tensor of the top level.
class CostCounter {
 public:
  CostCounter(const CutGraph& graph, const Stack& arguments)
      : graph_(graph), arguments_(arguments) {}

  GraphCosts run() {
    const RandomStateScope random(RandomState::capture());
    std::vector<at::Tensor> boundary;
    for (std::size_t i = 0; i <= graph_.cuts.size(); ++i) boundary = run_piece(i, boundary);
    return std::move(costs_);
  }

 private:
  std::vector<at::Tensor> run_piece(std::size_t piece, const std::vector<at::Tensor>& boundary) {
    const bool is_last = piece == graph_.cuts.size();
    Cut to;
    if (!is_last) to = graph_.cuts[piece];
    to.position = end_of(graph_, piece);
    const std::size_t num_crossing = to.tensors.size();
    const std::set<const Value*> crossing(to.tensors.begin(), to.tensors.end());
    for (std::size_t k = begin_of(graph_, piece); k < to.position; ++k) {
      for (Value* output : graph_.nodes[k]->outputs()) {
        if (is_tensor(output) && crossing.count(output) == 0) to.tensors.push_back(output);
      }
    }
    const Cut* from = piece == 0 ? nullptr : &graph_.cuts[piece - 1];
    const Segment segment(graph_, from, &to);
    const WorkCounter counter;
    SavedMemory saved;
    std::vector<at::Tensor> outputs = run_detached(segment, boundary);
    if (from != nullptr) note_saved(from->tensors, boundary, saved);
    note_saved(to.tensors, outputs, saved);
    costs_.pieces.push_back({counter.work(), new_bytes(segment, boundary, outputs, to.tensors)});
    outputs.erase(outputs.begin() + static_cast<std::ptrdiff_t>(num_crossing),
                  outputs.begin() + static_cast<std::ptrdiff_t>(to.tensors.size()));
    return outputs;
  }

  std::vector<at::Tensor> run_detached(const Segment& segment,
                                       const std::vector<at::Tensor>& boundary) const {
    std::vector<at::Tensor> outputs;
    {
      const torch::AutoGradMode with_grad(true);
      std::vector<at::Tensor> inputs;
      for (const at::Tensor& tensor : boundary) {
        inputs.push_back(tensor.defined() ? tensor.detach() : tensor);
        if (tensor.defined() && tensor.is_floating_point()) inputs.back().requires_grad_();
      }
      outputs = segment.run_unnoticed(inputs, arguments_);
    }
    for (at::Tensor& output : outputs) {
      if (output.defined()) output = output.detach();
    }
    return outputs;
  }

  void note_saved(const std::vector<Value*>& values, const std::vector<at::Tensor>& tensors,
                  const SavedMemory& saved) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool has_gradient = tensors[i].defined() && tensors[i].is_floating_point();
      if (!has_gradient || saved.holds(tensors[i])) costs_.saved.insert(values[i]);
    }
  }

  double new_bytes(const Segment& segment, const std::vector<at::Tensor>& boundary,
                   const std::vector<at::Tensor>& outputs, const std::vector<Value*>& values) {
    std::set<const void*> seen;
    const auto is_new = [&](const at::Tensor& tensor) {
      return storage_of(tensor) != nullptr && seen.insert(storage_of(tensor)).second;
    };
    for (const at::Tensor& tensor : boundary) is_new(tensor);
    for (const StateTensor& state : segment.state()) is_new(state.tensor);
    double bytes = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!outputs[i].defined()) continue;
      costs_.bytes_of[values[i]] = static_cast<double>(outputs[i].nbytes());
      if (is_new(outputs[i])) bytes += static_cast<double>(outputs[i].nbytes());
    }
    return bytes;
  }

  const CutGraph& graph_;
  const Stack& arguments_;
  GraphCosts costs_;
};

// What a cut adds to the bytes that are held from forward to backward: what crosses it, and not the
// one before. What a product gave and backward needs would mostly be held anyway.
double added_bytes(const GraphCosts& costs, const Cut& cut, const Cut* before) {
  constexpr double kPartOfNeeded = 0.25;
  double bytes = 0;
  for (Value* value : cut.tensors) {
    const bool is_held =
        before != nullptr &&
        std::find(before->tensors.begin(), before->tensors.end(), value) != before->tensors.end();
    const auto found = costs.bytes_of.find(value);
    if (is_held || found == costs.bytes_of.end()) continue;
    const bool is_needed = costs.saved.count(value) != 0 && !is_recomputable(value);
    bytes += is_needed ? kPartOfNeeded * found->second : found->second;
  }
  return bytes;
}

// Finds the cuts for which a sum is least: of the squares of each stage's shares in work and in
// memory, and of what each cut adds to memory, as a share as well, with a little for any cut. So
// stages are about equal, a cut is made where it is cheap, and a large stage is left whole where
// any cut in it would hold what could be made again for little. More stages would lower the floor
// by a little, but options of a stage save more for their time than a boundary in its middle.
class CutChoice {
 public:
  CutChoice(const std::vector<Cut>& cuts, const GraphCosts& costs) : cuts_(cuts), costs_(costs) {
    Piece total;
    for (const Piece& piece : costs.pieces) {
      total.work += piece.work;
      total.bytes += piece.bytes;
    }
    total_bytes_ = total.bytes;
    for (const Piece& piece : costs.pieces) {
      const Piece& before = before_.back();
      before_.push_back({before.work + (total.work > 0 ? piece.work / total.work : 0),
                         before.bytes + (total.bytes > 0 ? piece.bytes / total.bytes : 0)});
    }
  }

  std::vector<const Cut*> run() {
    for (std::size_t end = 1; end <= cuts_.size() + 1; ++end) best_.push_back(best_to(end));
    return path_to(best_.size() - 1);
  }

 private:
  // The best way to make the last cut, by its number from 1 on, or to end (one more).
  struct Way {
    double cost = std::numeric_limits<double>::infinity();
    std::size_t before = 0;  // the cut before; 0: none
  };

  Way best_to(std::size_t end) const {
    constexpr double kLargestShare = 0.3;  // of a stage that could be smaller
    const bool is_end = end == cuts_.size() + 1;
    Way best;
    for (std::size_t before = end; before-- > 0;) {
      const double work = before_[end].work - before_[before].work,
                   bytes = before_[end].bytes - before_[before].bytes;
      const bool is_large = std::max(work, bytes) > kLargestShare;
      if (is_large && best.cost < std::numeric_limits<double>::infinity()) break;
      double cost = best_[before].cost + (work * work + bytes * bytes) / 2;
      if (cost >= best.cost) continue;
      if (!is_end) {
        const Cut& cut = cuts_[end - 1];
        cost += cost_of(cut, before == 0 ? nullptr : &cuts_[before - 1]);
        if (cost >= best.cost || !may_follow(cut, path_to(before))) continue;
      }
      best = {cost, before};
    }
    return best;
  }

  double cost_of(const Cut& cut, const Cut* before) const {
    constexpr double kOfAnyCut = 0.004;  // makes a dozen stages where cuts add little
    return kOfAnyCut + (total_bytes_ > 0 ? added_bytes(costs_, cut, before) / total_bytes_ : 0);
  }

  std::vector<const Cut*> path_to(std::size_t end) const {
    std::vector<const Cut*> path;
    for (; end != 0; end = best_[end].before) {
      if (end <= cuts_.size()) path.push_back(&cuts_[end - 1]);
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

  const std::vector<Cut>& cuts_;
  const GraphCosts& costs_;
  double total_bytes_ = 0;
  std::vector<Piece> before_{{0, 0}};  // shares of all that is before each cut
  std::vector<Way> best_{{0, 0}};
};

}  // namespace

std::vector<const Cut*> choose_cuts(const CutGraph& graph, const std::optional<Stack>& arguments) {
  const GraphCosts costs = arguments ? CostCounter(graph, *arguments).run() : count_nodes(graph);
  return CutChoice(graph.cuts, costs).run();
}

}  // namespace headroom::script
