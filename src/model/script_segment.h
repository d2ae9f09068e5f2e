#pragma once

#include "model/script_branches.h"
#include "model/script_cuts.h"
#include "model/script_selective.h"

#include <headroom/core/micro_batch.h>

#include <torch/csrc/jit/runtime/interpreter.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom::script {

/// The nodes of a graph between two cuts as a graph of their own, which runs by itself.
class Segment {
 public:
  /// `from` null: from the beginning; `to` null: to the end. The graph must outlive nothing: what
  /// is needed of it is copied.
  Segment(const CutGraph& graph, const Cut* from, const Cut* to);

  /// `boundary` is what the segment before returned. Not for the last segment. `option` is an index
  /// into options().
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& boundary,
                              const torch::jit::Stack& arguments, int option = 0) const;
  /// What the model returns; for the last segment.
  torch::jit::Stack run_last(const std::vector<at::Tensor>& boundary,
                             const torch::jit::Stack& arguments, int option = 0) const;

  /// The same as run() with all but the results left as it was.
  std::vector<at::Tensor> run_unnoticed(const std::vector<at::Tensor>& boundary,
                                        const torch::jit::Stack& arguments) const;

  /// Finds out which branches data of these shapes takes, so that options() can keep less of what
  /// is inside of them. For data that takes others, every option keeps everything.
  void take_branches(const std::vector<at::Tensor>& boundary, const torch::jit::Stack& arguments);

  /// Ways to keep what backward needs, as Stage::options().
  std::vector<std::string> options() const;

  const std::vector<StateTensor>& state() const { return state_; }
  /// True when what it computes depends on a buffer that some forward writes.
  bool depends_on_buffers() const { return depends_on_buffers_; }
  /// The same for segments that do the same work on the same shapes, with other weights. Empty
  /// where the work depends on values.
  const std::string& kind() const { return kind_; }
  const torch::jit::Graph& graph() const { return *graph_; }

 private:
  enum class Source { kBoundary, kArgument, kState };
  struct Input {
    Source source;
    std::size_t index;
    c10::TypePtr type;
  };
  class Builder;

  // A way to keep less than everything.
  struct Selective {
    std::string name;
    std::shared_ptr<const SelectiveCode> code;
  };
  const std::vector<Selective>& selective() const;

  torch::jit::Stack stack_of(const std::vector<at::Tensor>& boundary,
                             const torch::jit::Stack& arguments) const;
  torch::jit::Stack run_stack(const std::vector<at::Tensor>& boundary,
                              const torch::jit::Stack& arguments, int option) const;

  std::shared_ptr<torch::jit::Graph> graph_;
  torch::jit::Code code_;
  std::vector<Input> inputs_;
  std::vector<bool> output_is_tensor_;
  std::vector<StateTensor> state_;
  bool depends_on_buffers_ = false;
  std::string kind_;
  std::shared_ptr<const TakenBranches> branches_;            // null: none are known
  mutable std::optional<std::vector<Selective>> selective_;  // made when they are first asked for
};

/// The segments between cuts, which are in order. With the arguments of a forward, the branches
/// that it takes are known to them.
std::vector<Segment> segments_between(
    const CutGraph& graph, const std::vector<const Cut*>& cuts,
    const std::optional<torch::jit::Stack>& arguments = std::nullopt);

/// Whether the node gives elements of a tensor as numbers.
bool reads_elements(const torch::jit::Node* node);

/// While it lives, the interpreter throws what an operator threw, so that memory running out is
/// seen as that, and a message is the operator's.
class OperatorExceptionsScope {
 public:
  OperatorExceptionsScope();
  ~OperatorExceptionsScope();
  OperatorExceptionsScope(const OperatorExceptionsScope&) = delete;
  OperatorExceptionsScope& operator=(const OperatorExceptionsScope&) = delete;

 private:
  bool before_;
};

/// Runs interpreted code in such a scope.
void run_code(const torch::jit::Code& code, torch::jit::Stack& stack);

/// The tensors of a value, however nested, in order; of a dictionary in the order of its making.
std::vector<at::Tensor> tensors_of(const torch::jit::Stack& values);

}  // namespace headroom::script
