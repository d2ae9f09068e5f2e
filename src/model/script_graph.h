#pragma once

// A TorchScript module as one flat graph: no calls, no `self`, and as little control flow and list
// handling as can be decided without running it.

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom::script {

/// A tensor that a model owns.
struct StateTensor {
  std::string name;  ///< "layer1.0.conv1.weight"
  at::Tensor tensor;
  bool is_parameter = false;  ///< otherwise a buffer
};

/// The inputs of the graph are first the arguments of forward, then the state, each tensor once
/// however many names it has.
struct FlatGraph {
  std::shared_ptr<torch::jit::Graph> graph;
  std::size_t num_arguments = 0;
  std::vector<StateTensor> state;

  /// The state tensor that `value` is; null for any other value.
  const StateTensor* state_of(const torch::jit::Value* value) const;
};

/// Values for arguments that are the same in every call, by their number.
using FixedArguments = std::map<std::size_t, torch::jit::IValue>;

/// Flattens forward as it is in the module's present mode (train or eval). The graph reads and
/// writes the module's own tensors. Throws ConfigError, naming it, for an attribute that forward
/// sets and is no tensor, and for a module that is used as a value.
FlatGraph flatten(const torch::jit::Module& module, const FixedArguments& fixed = {});

/// Whether forward may take the calls with which PyTorch's attention and encoder layers evaluate:
/// all of a layer in one, which fails under autocast.
bool has_fused_layers(const torch::jit::Block* block);
bool has_fused_layers(const torch::jit::Module& module);

/// Traces a C++ function that reads `state` beside its inputs. Random state and buffers are left as
/// they were. Shapes are baked in.
FlatGraph trace(const std::function<torch::jit::Stack(torch::jit::Stack)>& function,
                const torch::jit::Stack& inputs, std::vector<StateTensor> state);

/// Folds what is constant, unrolls loops of known length, and follows lists and dictionaries.
/// Changes neither what autograd records nor which random numbers are drawn.
void simplify(std::shared_ptr<torch::jit::Graph>& graph);

bool is_tensor(const torch::jit::Value* value);

}  // namespace headroom::script
