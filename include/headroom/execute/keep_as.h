#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

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

}  // namespace headroom
