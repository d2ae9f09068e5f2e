#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace headroom {

/// The state of LibTorch's default random generators (CPU, and every CUDA device where present): what the next random number
/// depends on. A value: copying it copies the state.
class RandomState {
 public:
  /// Reads the current state.
  static RandomState capture();
  /// Makes it the current state again.
  void restore() const;

  /// The CPU generator's state as bytes, for snapshots.
  const at::Tensor& cpu() const { return cpu_; }
  static RandomState from_cpu(at::Tensor cpu_state);

 private:
  at::Tensor cpu_;
  std::vector<at::Tensor> cuda_;
};

/// Restores `state` for the lifetime of the scope, and afterwards the state from before.
class RandomStateScope {
 public:
  explicit RandomStateScope(const RandomState& state) : before_(RandomState::capture()) { state.restore(); }
  ~RandomStateScope() { before_.restore(); }
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  RandomState before_;
};

/// Seeds every default generator.
void seed_everything(std::uint64_t seed);

}  // namespace headroom
