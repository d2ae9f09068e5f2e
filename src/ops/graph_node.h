#pragma once

// Nodes of autograd's graph that hold less in backward than a torch::autograd::Function does: they
// let go of a tensor as soon as they have read it, and may write into a gradient that nobody else
// holds.

#include "core/autograd_node.h"
#include "core/engine.h"
#include "ops/passes.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace headroom::ops {

/// Whether a node can tell if backward may come again. Asked first outside of any backward.
inline bool sees_backward() {
  static const bool sees = install_engine();
  return sees;
}

/// A tensor that a node keeps for backward, through the hooks for saved tensors like any other.
class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(const at::Tensor& tensor) : saved_(tensor, /*is_output=*/false) {}

  at::Tensor get() const { return saved_.unpack(); }
  /// The same; it is then kept no longer, unless backward may come again.
  at::Tensor take() {
    at::Tensor tensor = get();
    if (sees_backward() && !backward_keeps_graph()) release();
    return tensor;
  }
  void release() { saved_.reset_data(); }

 private:
  torch::autograd::SavedVariable saved_;
};

/// Whether a gradient that was moved out of what a node is given may be written to.
inline bool is_owned_alone(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && gradient.storage().use_count() == 1;
}

/// A new node whose gradients are those of `inputs`, in order; null where none of them wants one.
template <class NodeType>
NodePtrOf<NodeType> make_node_for(at::ArrayRef<at::Tensor> inputs) {
  if (!wants_grad(inputs)) return {};
  sees_backward();
  NodePtrOf<NodeType> node = make_node<NodeType>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  return node;
}

/// What forward() gives without gradients, as the output of `node`, which may be null.
template <class NodePtrType, class Forward>
at::Tensor with_history(const NodePtrType& node, const Forward& forward) {
  at::Tensor output;
  {
    const at::NoGradGuard no_grad;
    output = forward();
  }
  if (node) torch::autograd::set_history(output, node);
  return output;
}

}  // namespace headroom::ops
