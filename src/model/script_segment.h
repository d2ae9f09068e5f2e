#pragma once

#include "model/script_cuts.h"

#include <headroom/core/micro_batch.h>

#include <torch/csrc/jit/runtime/interpreter.h>

#include <string>
#include <vector>

namespace headroom::script {

/// The nodes of a graph between two cuts as a graph of their own, which runs by itself.
class Segment {
 public:
  /// `from` null: from the beginning; `to` null: to the end. The graph must outlive nothing: what
  /// is needed of it is copied.
  Segment(const CutGraph& graph, const Cut* from, const Cut* to);

  /// `boundary` is what the segment before returned. Not for the last segment.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& boundary,
                              const torch::jit::Stack& arguments) const;
  /// What the model returns; for the last segment.
  torch::jit::Stack run_last(const std::vector<at::Tensor>& boundary,
                             const torch::jit::Stack& arguments) const;

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

  torch::jit::Stack run_stack(const std::vector<at::Tensor>& boundary,
                              const torch::jit::Stack& arguments) const;

  std::shared_ptr<torch::jit::Graph> graph_;
  torch::jit::Code code_;
  std::vector<Input> inputs_;
  std::vector<bool> output_is_tensor_;
  std::vector<StateTensor> state_;
  bool depends_on_buffers_ = false;
  std::string kind_;
};

/// The tensors of a value, however nested, in order; of a dictionary in the order of its making.
std::vector<at::Tensor> tensors_of(const torch::jit::Stack& values);

}  // namespace headroom::script
