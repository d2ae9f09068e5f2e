#pragma once

#include <cstdint>

namespace headroom {

/// What one update came to.
struct Update {
  double loss = 0.0;  ///< of the global batch
  double grad_norm = 0.0;
  double learning_rate = 0.0;    ///< that it was made with
  double loss_scale = 1.0;       ///< after it
  std::int64_t num_samples = 0;  ///< over all ranks
  bool applied = false;          ///< false: something was not finite, and it was skipped
  std::int64_t live_bytes = 0;   ///< of tensors, after it
  std::int64_t peak_bytes = 0;   ///< of all updates so far
};

}  // namespace headroom
