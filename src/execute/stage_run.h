#pragma once

// How the executor, and the profile that predicts it, run one stage. Both must do the same, or
// predictions would be wrong.

#include <headroom/core/random.h>
#include <headroom/model/chain.h>

#include "core/autograd_node.h"
#include "execute/boundary_store.h"
#include "execute/recompute_state.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Takes a gradient out of the graph. Stands where a leaf would, but holds no tensor.
class GradientTap final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradient = std::move(gradients.at(0));
    return {};
  }

  at::Tensor gradient;
};

using Tensors = std::vector<at::Tensor>;

/// The options of a stage that a run uses: `count` of them from `first` on. Plans count from 0.
struct OptionRange {
  int first = 0, count = 1;
};
/// `half` and `compute` are those of StageCall.
OptionRange options_in_use(const Stage& stage, std::optional<at::ScalarType> half,
                           std::optional<at::ScalarType> compute);

/// One stage of a chain on one micro-batch.
struct StageCall {
  Stage& stage;
  const MicroBatch& micro;
  bool is_first = false;             ///< its inputs are the chain's
  bool is_last = false;              ///< its output is the loss
  bool wants_input_gradient = true;  ///< false: no stage before it has a parameter to train
  /// When set, what is kept between forward and backward, and the boundaries between stages, are in
  /// this type; computing stays in fp32.
  std::optional<at::ScalarType> half;
  /// When set, forward runs under autocast to this type. Boundaries are then in whatever type the
  /// stage returns.
  std::optional<at::ScalarType> compute;
};

/// A stage between its forward and its backward. Holds the graph by its edges, so that it keeps no
/// tensor alive that backward does not need.
struct KeptStage {
  Tensors outputs;  ///< without graph, as the next stage reads them
  torch::autograd::edge_list
      roots;  ///< where the gradients of the outputs enter; no function: not differentiable
  std::vector<NodePtrOf<GradientTap>>
      taps;  ///< where the gradients of the inputs come out; null: none is wanted
};

/// The first stage that has a parameter to train; the number of stages when there is none. The
/// gradient of a boundary before it is wanted by nobody.
std::size_t first_trained_stage(const Chain& chain);

/// Runs forward and keeps nothing but what it returns.
Tensors forward_discarding(const StageCall& call, const Tensors& inputs);

/// Runs forward and keeps what backward needs. With `stored`, of which `inputs` were read, backward
/// reads the inputs from there again.
KeptStage forward_keeping(const StageCall& call, const Tensors& inputs, int option,
                          const std::shared_ptr<StoredBoundary>& stored = nullptr);

/// The gradient that backward of the last stage starts from: `scale` for the loss, its first
/// output.
Tensors loss_gradient(const KeptStage& last, double scale);

/// Runs backward: adds to the gradients of the stage's parameters and returns those of its inputs
/// (undefined where none is wanted). Whatever the stage kept is gone afterwards.
Tensors backward_through(KeptStage kept, Tensors output_gradients);

/// A number that is the same for equal bytes, to compare a recomputed value with the first one.
std::uint64_t fingerprint(const Tensors& tensors);

}  // namespace headroom
