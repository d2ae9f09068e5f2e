#pragma once

// The operators that segments run for batch norms in training.

#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <memory>

namespace headroom::script {

/// Whether the node is a batch norm that takes the statistics of the batch, and so reads none of
/// those that it keeps.
bool is_training_norm(const torch::jit::Node* node);

/// Gives for a value that a node reads the value of another graph.
using ValueMap = std::function<torch::jit::Value*(torch::jit::Value*)>;

/// A node of `graph`, to be inserted, that does what the training norm does, in less time and with
/// the same bits; it gives y, and the batch's mean and 1 / deviation.
torch::jit::Node* create_norm(torch::jit::Graph& graph, const torch::jit::Node* norm,
                              const ValueMap& map);
/// One that gives y again from these.
torch::jit::Node* create_norm_again(torch::jit::Graph& graph, const torch::jit::Node* norm,
                                    const ValueMap& map, torch::jit::Value* mean,
                                    torch::jit::Value* rstd);

/// A copy of the graph in which every training norm is such a node.
std::shared_ptr<torch::jit::Graph> with_own_norms(const torch::jit::Graph& graph);

}  // namespace headroom::script
