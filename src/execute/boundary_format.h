#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/execute/keep_as.h>

#include <cstdint>
#include <string>

namespace headroom {

/// What it costs to hold boundaries of about `boundary_bytes` in a format, for the planner: the
/// size ratio, and the time of storing and reading back, measured here and now. Its name is "bf16",
/// "fp16" or "disk". `folder` is where KeepAs::kDisk puts its file, as of KeepAsScope. Occupies at
/// most two such boundaries meanwhile. Throws what storing throws.
BoundaryFormat measure_boundary_format(KeepAs format, std::int64_t boundary_bytes,
                                       const std::string& folder = "");

}  // namespace headroom
