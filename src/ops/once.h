#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace headroom::ops {

/// Our backward passes run on raw memory: a gradient of a gradient would silently be missing, so
/// asking for one is an error.
inline void check_differentiated_once(const char* name) {
  TORCH_CHECK(
      !at::GradMode::is_enabled(), name,
      " can be differentiated once only: call backward without create_graph, or give it double");
}

}  // namespace headroom::ops
