#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>

#include "execute/boundary_memory.h"
#include "execute/profile.h"
#include "execute/stage_run.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace headroom {

/// What one stage costs, but for what depends on the stages around it.
struct StageProfile {
  StageCosts grads_unallocated;
  StageCosts grads_preallocated;
  bool hands_on = false;                       ///< some memory of the input is memory of the output
  std::vector<InputGradient> input_gradients;  ///< as the first run had them; empty: none yet
};

/// Of the gradient of an output: shape and type alone, which take no memory of either meter.
struct GradientShape {
  std::vector<std::int64_t> sizes;
  at::ScalarType type = at::kFloat;
  bool exists = false;  ///< false: the output has no gradient
};

/// Clears the gradients of everything that is profiled, now and when profiling ends, however it
/// ends.
class CleanGradients {
 public:
  explicit CleanGradients(std::vector<at::Tensor> parameters);
  ~CleanGradients() { clear(); }
  CleanGradients(const CleanGradients&) = delete;
  CleanGradients& operator=(const CleanGradients&) = delete;
  void clear();

 private:
  std::vector<at::Tensor> parameters_;
};

/// Measures one stage of a chain at a time, by running it on inputs that it is given. The arguments
/// are those of profile_chain(), and must outlive it.
class StageProfiler {
 public:
  StageProfiler(const Chain& chain, const MicroBatch& micro, std::optional<at::ScalarType> half,
                std::optional<at::ScalarType> compute, const std::function<void()>& between_runs,
                const ChainProfile* counted);

  /// Fills `profile` and returns the outputs; none for the last stage.
  Tensors measure(std::size_t index, const Tensors& inputs, StageProfile& profile);

  /// Runs forward and measures nothing. Every run starts from the same random state and leaves the
  /// buffers as they were.
  Tensors run_once(std::size_t index, const Tensors& inputs);

  /// False: on the meta device, for bytes alone.
  bool has_memory() const { return has_memory_; }
  std::size_t first_trained() const { return first_trained_; }
  /// How many trained parameters of a stage a later stage uses too.
  std::size_t num_tied(std::size_t index) const;
  /// Whether every option of every stage so far ran in the memory there is.
  bool is_complete() const { return is_complete_; }
  /// Whether every stage so far has an option that did.
  bool fits() const { return fits_; }

 private:
  std::vector<at::Tensor> parameters_of(std::size_t index) const;  // those that are trained
  StageCall call(std::size_t index) const;
  void measure_option(std::size_t index, const Tensors& inputs,
                      const std::vector<GradientShape>& shapes, int option, StageProfile& profile);
  // Where bytes are known, one run of a stage that takes long tells its times. False when it does
  // not fit.
  bool measure_times(std::size_t index, const Tensors& inputs,
                     const std::vector<GradientShape>& shapes, int option, StageProfile& profile);
  // Forward and backward of one stage. `new_gradient_bytes` gets the parameter gradients that
  // appeared, and `places` where the gradients of the inputs are, unless it was known.
  StageOption measure_run(std::size_t index, const Tensors& inputs,
                          const std::vector<GradientShape>& shapes, int option,
                          std::vector<InputGradient>& places, std::int64_t* new_gradient_bytes);

  const Chain& chain_;
  const MicroBatch& micro_;
  std::optional<at::ScalarType> half_;
  std::optional<at::ScalarType> compute_;
  const std::function<void()>& between_runs_;
  const ChainProfile* counted_;  // null: bytes are not known
  CleanGradients clean_;
  bool has_memory_;
  std::size_t first_trained_;
  bool is_complete_ = true;
  bool fits_ = true;
  std::map<const void*, std::size_t> last_user_;
};

}  // namespace headroom
