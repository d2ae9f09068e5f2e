#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace headroom {

/// What every stage of a chain costs for one micro-batch, measured by running it exactly as the
/// executor does.
struct ChainProfile {
  std::int64_t num_samples = 0;
  std::int64_t input_bytes = 0;  ///< of the micro-batch itself
  /// Parameter gradients appear while backward runs: the first micro-batch of a window.
  ChainCosts grads_unallocated;
  /// Parameter gradients are allocated already: the other micro-batches of a window.
  ChainCosts grads_preallocated;
  bool is_complete = true;  ///< false: some option of a stage did not fit under the cap
  bool is_timed = true;  ///< false: bytes were counted on the meta device, and every stage is as if
                         ///< it took equally long
  double seconds = 0.0;  ///< that measuring took
  std::int64_t num_distinct =
      0;  ///< stages that had to be measured; the others are equal to one of these
};

/// Measures a chain on `micro`. Stages of equal kind and input are measured once. One stage at a
/// time is in memory, with its own gradients. Parameters, buffers and random state are left as they
/// were; gradients are cleared before and after. `half` and `compute` are
/// ExecutorOptions::keep_in_half and compute_in_half. Returns nothing when a stage alone does not
/// fit under the meter's cap. With chain and micro-batch on the meta device bytes are counted and
/// nothing is timed; only some operators run, alone (CountOnlyScope). `between_runs` is called
/// before each stage and option; whatever it throws ends the measuring. `before_stage`, where it is
/// set, brings the weights of a stage that is run into memory; equal stages mostly are not.
/// `counted`, where it is not null, has the bytes of the same micro-batch by count_chain(), and is
/// known to be right: long stages are then run half as often.
std::optional<ChainProfile> profile_chain(
    const Chain& chain, const MicroBatch& micro, std::optional<at::ScalarType> half = std::nullopt,
    std::optional<at::ScalarType> compute = std::nullopt,
    const std::function<void()>& between_runs = [] {},
    const std::function<void(std::size_t stage)>& before_stage = {},
    const ChainProfile* counted = nullptr);

/// The bytes of `num_samples` samples, counted on the meta device without running anything: those
/// that would be measured, but for a few bytes more that are left for scalars. `like` is any
/// micro-batch of the chain. Returns nothing when some stage does not run without memory, or has an
/// operator (a convolution, a norm of LibTorch's) whose scratch memory only running it tells.
std::optional<ChainProfile> count_chain(const Chain& chain, const MicroBatch& like,
                                        std::int64_t num_samples,
                                        std::optional<at::ScalarType> half = std::nullopt);

/// True when no counted bytes are below the measured ones, nor above by more than 1% and 1 KiB.
/// Options that did not fit are not compared.
bool agree(const ChainProfile& measured, const ChainProfile& counted);

/// Gives `profile` the bytes of `counted`, but for options that did not fit, and leaves its times.
void take_bytes(ChainProfile& profile, const ChainProfile& counted);

/// The costs at `num_samples` on the line through two profiles of the same chain, `small` having
/// fewer samples than `large`. Never below zero. `small` may be empty_profile(): the line then goes
/// through the origin.
ChainProfile interpolate(const ChainProfile& small, const ChainProfile& large,
                         std::int64_t num_samples);

/// No samples, no bytes, no time, for the same stages and options.
ChainProfile empty_profile(const ChainProfile& like);

}  // namespace headroom
