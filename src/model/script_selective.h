#pragma once

// A segment that keeps less for backward than autograd would.

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <cstddef>
#include <memory>
#include <set>
#include <vector>

namespace headroom::script {

/// Runs a graph so that what some of its nodes gave is not kept: when backward asks for it, they
/// are run again, from what is kept. Nodes that depend on each other are run again together, once,
/// when the first of their results is asked for. Autograd's graph is that of the plain run, and so
/// are all numbers.
class SelectiveCode : public std::enable_shared_from_this<SelectiveCode> {
 public:
  /// `recomputed` as nodes_to_recompute() gives them.
  static std::shared_ptr<const SelectiveCode> make(
      const torch::jit::Graph& graph, const std::set<const torch::jit::Node*>& recomputed);

  /// The outputs of the graph. Gradients must be enabled, and autocast off.
  torch::jit::Stack run(torch::jit::Stack inputs) const;

 private:
  class Builder;
  class Forward;
  class Island;
  class Saved;

  // One node that is run again, or several in a row that are not. Values are known by their slots.
  struct Step {
    torch::jit::Code code;
    std::vector<std::size_t> inputs;
    std::vector<std::size_t> outputs;
    std::vector<std::size_t> last_reads;  // slots that nobody reads afterwards
    // Where it is run again:
    int island = -1;         // -1: it is not
    torch::jit::Code again;  // batch norms leave their statistics alone
    std::vector<std::size_t> again_inputs;
    std::vector<std::size_t> outside;  // of those, what no step that is run again gives
    std::vector<std::size_t> own;      // of those, what it gave itself: a norm's mean and deviation
    std::vector<std::size_t> needs;    // steps that are run again with this one
  };

  SelectiveCode() = default;

  std::vector<Step> steps_;
  std::size_t num_slots_ = 0;
  std::size_t num_inputs_ = 0;  // the first slots
  std::size_t num_islands_ = 0;
  std::vector<std::size_t> outputs_;  // slots
};

}  // namespace headroom::script
