#pragma once

#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>
#include <headroom/plan/plan.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace headroom {

/// What running one micro-batch came to.
struct MicroResult {
  double loss_sum = 0.0;            ///< summed over the items
  std::int64_t num_forwards = 0;    ///< of stages
  std::int64_t num_recomputes = 0;  ///< those of them that were not the stage's first
};

struct ExecutorOptions {
  /// Compare every recomputed value with the first one; an Error names the stage that differs.
  bool check_recomputed_values = false;
  /// When set (bf16 or fp16), activations are kept in this type and computed in fp32. Every plan rounds the same values, so that plans
  /// still agree bit for bit with each other.
  std::optional<at::ScalarType> keep_in_half;
  /// When set, stages run under autocast to this type, with fp32 weights; not together with keep_in_half.
  std::optional<at::ScalarType> compute_in_half;
  /// Called after each operation, with its index, for a timeline of memory.
  std::function<void(std::size_t operation)> on_operation;
};

/// Carries out plans over a chain: each stage is its own small autograd graph between detached boundaries, and a flat list of
/// operations says which to run. For one micro-batch every valid list gives bit-identical losses, gradients, buffers and random state.
class Executor {
 public:
  explicit Executor(Chain chain, ExecutorOptions options = {});
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs forward, recomputation and backward of one micro-batch; adds the gradient of scale x loss to the parameters' gradients, in
  /// place. Throws what a stage throws; then the gradients are in an undefined state, and nothing else is held.
  MicroResult accumulate(const MicroBatch& micro, const std::vector<Operation>& operations, double scale);

  /// Runs forward without gradients and returns what the last stage returned: loss first.
  std::vector<at::Tensor> evaluate(const MicroBatch& micro) const;

  const Chain& chain() const { return chain_; }

 private:
  struct Run;

  Chain chain_;
  ExecutorOptions options_;
  std::vector<std::vector<at::Tensor>> stage_parameters_;
};

/// The plan that keeps everything: the ordinary way to train.
std::vector<Operation> keep_everything(std::size_t num_stages);

}  // namespace headroom
