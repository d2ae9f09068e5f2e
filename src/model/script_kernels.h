#pragma once

// The operators of ours that segments run in the place of LibTorch's, with the same bits: batch
// norms in training, with the ReLU behind them, which take less time (ops/batch_norm.h), and those
// that hold less (ops/lean_operators.h).

#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <memory>

namespace headroom::script {

/// Whether the node is a batch norm that takes the statistics of the batch, and so reads none of
/// those that it keeps.
bool is_training_norm(const torch::jit::Node* node);

/// Gives for a value that a node reads the value of another graph.
using ValueMap = std::function<torch::jit::Value*(torch::jit::Value*)>;

/// Makes one node of each batch norm in training and the ReLU that alone reads it: a node that
/// counts as a training norm, and has its arguments.
void join_norms_with_relus(torch::jit::Graph& graph);

/// A node of `graph`, to be inserted behind what is made at its insert point, that gives what
/// `node` does by an operator of ours; null where there is none. That of a training norm gives the
/// batch's mean and 1 / deviation as well.
torch::jit::Node* create_own(torch::jit::Graph& graph, const torch::jit::Node* node,
                             const ValueMap& map);
/// One that gives the output of a training norm again from these.
torch::jit::Node* create_norm_again(torch::jit::Graph& graph, const torch::jit::Node* norm,
                                    const ValueMap& map, torch::jit::Value* mean,
                                    torch::jit::Value* rstd);

/// A copy of the graph, with joined norms, in which every node that has an operator of ours is such
/// a node.
std::shared_ptr<torch::jit::Graph> with_own_kernels(const torch::jit::Graph& graph);

}  // namespace headroom::script
