#pragma once

#include <headroom/config/chain_costs.h>
#include <headroom/execute/executor.h>

#include <cstdint>
#include <string>

namespace headroom {

/// What it costs to hold boundaries of about `boundary_bytes` in a format, for the planner: the
/// size ratio, and the time of storing and reading back, measured here and now. `folder`
/// is where a format that needs a file makes it; empty: the system's folder for temporary files.
/// Occupies at most two such boundaries meanwhile. Throws ConfigError when the file cannot be made
/// and BudgetError when it cannot be written.
BoundaryFormat measure_boundary_format(KeepAs format, std::int64_t boundary_bytes,
                                       const std::string& folder = "");

}  // namespace headroom
