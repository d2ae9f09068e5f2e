#pragma once

#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>
#include <headroom/plan/schedule.h>

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// How what autograd saves is kept until backward.
enum class KeepAs : std::uint8_t {
  kBf16,  ///< float and double as bfloat16: half the bytes (a quarter); gradients then differ from
          ///< exact ones by some tenths of a percent
  kFp16,  ///< the same as half: more digits, but nothing above 65504
  kDisk,  ///< in a file, bit for bit
};

/// While the scope lives, tensors that operations on this thread save for backward are kept in
/// another way, and turned back when backward needs them; backward itself may run outside of the
/// scope. What is there anyway stays as it is: parameters, and leaves that are older than the
/// scope. A tensor that several operations save is stored once. Small ones (below 4 KiB) are kept
/// as usual.
///
/// Scopes nest with each other (the innermost counts) and with checkpoint: around a checkpoint they
/// act on its inputs, inside of fn on what fn saves.
///
/// The file is made in `folder` (the system's folder for temporary files when empty), has no name
/// from the start, so that nothing is left behind however the process ends, and gives space back as
/// tensors are freed. Throws ConfigError when it cannot be made; the operation that saves throws
/// BudgetError when it cannot be written (disk full). Installs the MemoryMeter.
class KeepAsScope {
 public:
  explicit KeepAsScope(KeepAs format, const std::string& folder = "");
  ~KeepAsScope();
  KeepAsScope(const KeepAsScope&) = delete;
  KeepAsScope& operator=(const KeepAsScope&) = delete;

  /// Says that `tensor` is in memory as `half` (of the scope's type) anyway: when it is saved,
  /// nothing is stored for it.
  void already_stored(const at::Tensor& tensor, const at::Tensor& half);
  /// What is stored for `tensor` in half precision, with its sizes and strides; undefined when
  /// nothing is.
  at::Tensor stored_half(const at::Tensor& tensor) const;

  /// Bytes of tensors that this scope took over, and bytes that it stores for them, so far.
  std::int64_t original_bytes() const;
  std::int64_t stored_bytes() const;

 private:
  class Source;
  struct State;
  std::unique_ptr<State> state_;
};

class SpillStore;
struct StageCall;

/// What running one micro-batch came to.
struct MicroResult {
  double loss_sum = 0.0;            ///< summed over the items
  std::int64_t num_forwards = 0;    ///< of stages
  std::int64_t num_recomputes = 0;  ///< those of them that were not the stage's first
};

struct ExecutorOptions {
  /// Compare every recomputed value with the first one; an Error names the stage that differs.
  bool check_recomputed_values = false;
  /// When set (bf16 or fp16), activations are kept in this type and computed in fp32. Every plan
  /// rounds the same values, so that plans still agree bit for bit with each other.
  std::optional<at::ScalarType> keep_in_half;
  /// What the formats of a plan's operations mean: Operation::format i > 0 is boundary_formats[i -
  /// 1], in the order of ChainCosts::boundary_formats that the plan was made for. A boundary on
  /// disk comes back bit for bit; one in half precision is rounded, and every stage that reads it
  /// reads the rounded value.
  std::vector<KeepAs> boundary_formats;
  /// Where KeepAs::kDisk puts its file, which has no name; empty: the system's folder for temporary
  /// files.
  std::string spill_dir;
  /// When set, stages run under autocast to this type, with fp32 weights: what they compute in it
  /// is kept in it. Not together with keep_in_half.
  std::optional<at::ScalarType> compute_in_half;
  /// Called before each operation of accumulate(), with its index, and before each stage of
  /// evaluate() and after the last, with its index: brings what it reads into memory.
  std::function<void(std::size_t operation)> before_operation;
  std::function<void(std::size_t stage)> before_evaluated_stage;
  /// Called after each operation, with its index, for a timeline of memory.
  std::function<void(std::size_t operation)> on_operation;
};

/// Carries out plans over a chain: each stage is its own small autograd graph between detached
/// boundaries, and a flat list of operations says which to run. For one micro-batch every valid
/// list gives bit-identical losses, gradients, buffers and random state.
class Executor {
 public:
  /// `last`, where it is given, runs in the place of the chain's last stage. Throws ConfigError
  /// when boundaries are to go to disk and spill_dir cannot be written.
  explicit Executor(Chain chain, ExecutorOptions options = {},
                    std::shared_ptr<Stage> last = nullptr);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs forward, recomputation and backward of one micro-batch; adds the gradient of scale x loss
  /// to the parameters' gradients, in place. Throws what a stage throws, BudgetError when a
  /// boundary cannot be written to disk, and ConfigError when an operation has a format that the
  /// options do not know; then the gradients are in an undefined state, and nothing else is held.
  MicroResult accumulate(const MicroBatch& micro, const std::vector<Operation>& operations,
                         double scale);

  /// Runs forward without gradients and returns what the last stage returned: loss first.
  std::vector<at::Tensor> evaluate(const MicroBatch& micro) const;
  /// The same for the first `num_stages` stages: returns the boundary behind them, as it is held.
  std::vector<at::Tensor> forward(const MicroBatch& micro, std::size_t num_stages) const;
  /// What the last stage makes of such a boundary. `micro` says what it belongs to.
  std::vector<at::Tensor> evaluate_last(const std::vector<at::Tensor>& boundary,
                                        const MicroBatch& micro) const;

  const Chain& chain() const { return chain_; }

 private:
  struct Run;

  Stage& stage(std::size_t index) const;
  StageCall call(std::size_t index, const MicroBatch& micro) const;

  Chain chain_;
  ExecutorOptions options_;
  std::shared_ptr<Stage> last_;              // null: the chain's own
  std::size_t first_trained_;                // the first stage with a parameter to train
  std::shared_ptr<SpillStore> spill_store_;  // only where a format needs it
  std::vector<std::vector<at::Tensor>> stage_parameters_;
};

/// For a chain that was cut from a model: compares the two on one micro-batch, bit by bit, with
/// everything kept and with everything recomputed: loss, the gradient of every parameter, buffers
/// and random state. Throws ConfigError, naming the first parameter that differs, and when the
/// model cannot be trained at all. Gradients are cleared before and after; buffers and random state
/// are left as they were. The whole model takes the memory of keeping everything: throws
/// c10::OutOfMemoryError when it is not there. Does nothing for any other chain.
void check_whole_model(const Chain& chain, const MicroBatch& micro);

/// The plan that keeps everything: the ordinary way to train.
std::vector<Operation> keep_everything(std::size_t num_stages);

}  // namespace headroom
