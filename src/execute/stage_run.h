#pragma once

// How the executor, and the profile that predicts it, run one stage. Both must do the same, or predictions would be wrong.

#include <headroom/core/random.h>
#include <headroom/model/chain.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

using Tensors = std::vector<at::Tensor>;

/// A stage between its forward and its backward.
struct KeptStage {
  Tensors inputs;   ///< detached from the stage before; floating-point ones require grad where the chain's input is not concerned
  Tensors outputs;  ///< hold the stage's graph
};

/// Runs forward and keeps nothing but what it returns.
Tensors forward_discarding(Stage& stage, const Tensors& inputs, const MicroBatch& micro);

/// Runs forward and keeps what backward needs. `inputs_need_grad` is false for the first stage.
KeptStage forward_keeping(Stage& stage, const Tensors& inputs, const MicroBatch& micro, int option, bool inputs_need_grad);

/// The outputs without their graph, for the next stage. Shares their memory.
Tensors detached(const Tensors& tensors);

/// The gradient that backward of the last stage starts from: `scale` for the loss, its first output.
Tensors loss_gradient(const KeptStage& last, double scale);

/// Runs backward: adds to the gradients of the stage's parameters and returns those of its inputs (undefined where none is wanted).
/// Whatever the stage kept is gone afterwards.
Tensors backward_through(KeptStage kept, Tensors output_gradients);

/// Remembers what a stage's forward depends on besides its inputs, so that a second forward gives the same values and leaves no trace.
class StageState {
 public:
  /// Call right before the first forward.
  static StageState record(const Stage& stage);

  /// Throws Error, naming the parameter, when one was changed since record().
  void check_parameters(const Stage& stage) const;

  const RandomState& random() const { return random_; }

 private:
  RandomState random_;
  std::vector<std::uint32_t> parameter_versions_;
};

/// For the lifetime of the scope the random state is that of the stage's first forward; afterwards random state and buffers
/// (BatchNorm's statistics) are as they were before it.
class RecomputeScope {
 public:
  RecomputeScope(const Stage& stage, const StageState& state);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  RandomStateScope random_;
  std::vector<std::pair<at::Tensor, std::string>> buffers_;  // with their bytes: copies outside of tensor memory
};

/// A number that is the same for equal bytes, to compare a recomputed value with the first one.
std::uint64_t fingerprint(const Tensors& tensors);

}  // namespace headroom
