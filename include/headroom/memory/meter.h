#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <string>

namespace headroom {

/// Whose bytes they are.
enum class Owner : std::uint8_t { kWeights, kGradients, kOptimizer, kActivations, kInputs, kOther };
inline constexpr std::size_t kNumOwners = 6;
/// "weights", "gradients", "optimizer", "activations", "inputs", "other".
const char* owner_name(Owner owner);

/// What the training step is doing. Phases outside of a step are kIdle.
enum class Phase : std::uint8_t { kIdle, kForward, kBackward, kUpdate };
inline constexpr std::size_t kNumPhases = 4;
/// "idle", "forward", "backward", "update".
const char* phase_name(Phase phase);

/// Bytes that CPU tensors occupy, as asked for by LibTorch (without rounding). Peaks are since the
/// last reset_peak().
struct MemoryUse {
  std::int64_t live_bytes = 0;
  std::int64_t peak_bytes = 0;
  std::array<std::int64_t, kNumOwners> live_by_owner{};
  std::array<std::int64_t, kNumOwners>
      peak_by_owner{};  ///< each owner's own peak; they need not coincide
  std::array<std::int64_t, kNumPhases>
      peak_by_phase{};  ///< the peak of all bytes within each phase
};

/// Thrown, instead of allocating, when the cap would be exceeded. LibTorch code sees an ordinary
/// out-of-memory error.
class OutOfBudget : public c10::OutOfMemoryError {
 public:
  OutOfBudget(std::int64_t requested_bytes, std::int64_t live_bytes, std::int64_t cap_bytes,
              const std::string& message);
  /// One line: bytes asked for, live and allowed, and the biggest owners.
  const char* what() const noexcept override { return what_without_backtrace(); }
  std::int64_t requested_bytes() const { return requested_bytes_; }
  std::int64_t live_bytes() const { return live_bytes_; }
  std::int64_t cap_bytes() const { return cap_bytes_; }

 private:
  std::int64_t requested_bytes_;
  std::int64_t live_bytes_;
  std::int64_t cap_bytes_;
};

/// Counts every byte of every CPU tensor, live and peak, by owner and phase, and can enforce a hard
/// cap. It is LibTorch's CPU allocator from the first call of instance() on; there is one, because
/// LibTorch has one. Freed blocks are pooled, and given back to the system before resident memory
/// would run ahead of the counted peak. Thread-safe.
class MemoryMeter {
 public:
  /// Installs the meter at the first call. Tensors made before are not counted.
  static MemoryMeter& instance();

  std::int64_t live_bytes() const;
  std::int64_t peak_bytes() const;
  MemoryUse use() const;
  /// Makes every peak start anew from the live bytes.
  void reset_peak();

  /// Bytes that may be live; 0 means no cap. An allocation that would exceed it throws OutOfBudget
  /// and changes nothing.
  void set_cap(std::int64_t cap_bytes);
  std::int64_t cap() const;

  /// Moves the bytes of a tensor's storage to another owner (a gradient, say, is born as a
  /// temporary of backward). Ignores tensors that the meter did not allocate.
  void assign_owner(const at::Tensor& tensor, Owner owner);

  /// Allocations are numbered from 1, those of the shape meter among them. The number of the latest
  /// one.
  std::uint64_t num_allocations() const;
  /// The number of the allocation behind a tensor's storage: unlike an address it is never used
  /// twice, and it tells which of two storages is older. 0 when the meter did not allocate it.
  std::uint64_t allocation_number(const at::Tensor& tensor) const;

  /// Gives all pooled free blocks back to the system. From then on the pool follows the peak since
  /// this call.
  void trim();

  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

 private:
  MemoryMeter() = default;
};

/// Allocations of this thread belong to `owner` while the scope lives. Without a scope they belong
/// to kOther.
class OwnerScope {
 public:
  explicit OwnerScope(Owner owner);
  ~OwnerScope();
  OwnerScope(const OwnerScope&) = delete;
  OwnerScope& operator=(const OwnerScope&) = delete;

 private:
  Owner before_;
};

/// To whom allocations of this thread belong now.
Owner current_owner();

/// The process is in `phase` while the scope lives.
class PhaseScope {
 public:
  explicit PhaseScope(Phase phase);
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  Phase before_;
};

/// After an exception left backward(), LibTorch's own engine still holds the failed graph and its
/// tensors on this thread: this lets go of them. The engine that the meter installs does so by
/// itself, so that a call is needed only where the meter came after the failure. Does nothing
/// inside of a backward.
void release_failed_backward();

/// Most bytes of this process that were ever resident (VmHWM) and that are now (VmRSS).
std::int64_t peak_resident_bytes();
std::int64_t resident_bytes();

}  // namespace headroom
