#pragma once

// Which operations of a segment backward can run again, instead of keeping what they gave.

#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <memory>
#include <set>

namespace headroom::script {

/// What is run again, each with all of the one before.
enum class Recomputed {
  kCheap,                 ///< pointwise operations, norms and views
  kAllButProducts,        ///< whatever is neither a product, nor a convolution, nor random
  kAllButWeightProducts,  ///< also products of two activations
  /// Also products with weights that take less than a third of the work for an element of the
  /// result that the costliest of the graph takes.
  kAllButCostlyProducts,
  kAll,  ///< also all other products: what is kept is what the graph gives, and random numbers
};

/// The tensor of the model that an input of a graph is; null for other values.
using StateOf = std::function<const at::Tensor*(const torch::jit::Value*)>;

/// Whether what gives the value may be run again at the level kAllButProducts.
bool is_recomputable(const torch::jit::Value* value);

/// A copy of the graph in which activations that need their input in backward do not write over it,
/// where nothing else reads that: autograd would keep a copy of the input that nobody could tell
/// from what is needed.
std::shared_ptr<torch::jit::Graph> without_overwriting(const torch::jit::Graph& graph);

/// Nodes of the graph's top level that give the same bits when backward runs them again, from what
/// is there anyway and from what the other nodes gave. Nodes whose results have to be kept anyway
/// (as outputs of the graph, say) are not among them. Empty where nothing is gained, or where the
/// graph writes to what is not its own.
std::set<const torch::jit::Node*> nodes_to_recompute(
    const std::shared_ptr<torch::jit::Graph>& graph, Recomputed which, const StateOf& state_of);

}  // namespace headroom::script
