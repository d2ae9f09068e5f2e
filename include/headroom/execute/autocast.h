#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace headroom {

/// Runs matrix products and the like in `dtype` while the scope lives, as torch.autocast does;
/// weights stay in fp32. On exit everything is as before: whether autocast was on, its type and its
/// cache, which the outermost scope empties. Scopes nest; `enabled` = false makes a scope of full
/// precision inside another. For the thread that opens it; leave it before backward, which repeats
/// the types of the forward.
///
/// Throws ConfigError for a device or a type that autocast does not have: bf16 on the CPU; bf16 and
/// fp16 on CUDA.
class Autocast {
 public:
  Autocast(c10::DeviceType device, c10::ScalarType dtype, bool enabled = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool enabled_before_;
  c10::ScalarType dtype_before_;
};

/// How half precision is best used on a device.
struct HalfPrecision {
  bool autocast = false;  ///< compute in it; otherwise compute in fp32 and keep activations in it
  std::string reason;     ///< one line for the user
};

/// Decides by what the device can do. CUDA computes in both types. A CPU computes in bf16 if it has
/// instructions for it (elsewhere a product is emulated, 20 to 100 times slower than in fp32), if
/// LibTorch's products use them safely, and if a product of the size of a layer is then clearly
/// faster than in fp32: that is tried, once per process, for a tenth of a second, and outside of
/// the budget.
HalfPrecision choose_half_precision(c10::Device device, c10::ScalarType dtype);

}  // namespace headroom
