#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace headroom {

/// The state of LibTorch's default random generators (CPU, and every CUDA device where present):
/// what the next random number depends on. A value; copies share the immutable state. Holds no CPU
/// tensor, so that recording it does not count as tensor memory.
class RandomState {
 public:
  /// Reads the current state.
  static RandomState capture();
  /// Makes it the current state again.
  void restore() const;

 private:
  struct Cpu;
  std::shared_ptr<const Cpu> cpu_;
  std::vector<at::Tensor> cuda_;
};

/// The CPU generator's state as a tensor of bytes, for snapshots, and back.
at::Tensor cpu_random_state();
void set_cpu_random_state(const at::Tensor& state);

/// Restores `state` for the lifetime of the scope, and afterwards the state from before.
class RandomStateScope {
 public:
  explicit RandomStateScope(const RandomState& state) : before_(RandomState::capture()) {
    state.restore();
  }
  ~RandomStateScope() { before_.restore(); }
  RandomStateScope(const RandomStateScope&) = delete;
  RandomStateScope& operator=(const RandomStateScope&) = delete;

 private:
  RandomState before_;
};

/// Seeds every default generator.
void seed_everything(std::uint64_t seed);

}  // namespace headroom
