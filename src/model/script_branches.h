#pragma once

// Branches that depend on shapes and settings, and on no element of a tensor: for one shape of data
// a model takes the same ones at every step.

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace headroom::script {

/// The branches of one graph that inputs of some shapes take.
class TakenBranches {
 public:
  /// Runs what decides about them. `written` are inputs that the graph may write to: those given
  /// stay as they are, and so does the random state. Null where the graph has no such branch.
  static std::shared_ptr<const TakenBranches> find(const torch::jit::Graph& graph,
                                                   const torch::jit::Stack& inputs,
                                                   std::vector<std::size_t> written);

  /// The graph without these `if`: the nodes of the branch that is taken are in its place.
  const torch::jit::Graph& graph() const { return *graph_; }

  /// Whether other inputs take the same. Known after the first time for each combination of shapes.
  bool are_taken_by(const torch::jit::Stack& inputs) const;

 private:
  TakenBranches() = default;

  std::shared_ptr<torch::jit::Graph> graph_;
  std::shared_ptr<torch::jit::Graph> deciding_;  // the same, with the conditions as outputs, too
  std::size_t num_outputs_ = 0;                  // before these
  std::vector<bool> is_true_;
  std::vector<std::size_t> written_;
  mutable std::map<std::vector<std::int64_t>, bool> known_;  // by shapes
};

}  // namespace headroom::script
