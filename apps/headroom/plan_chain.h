#pragma once

#include <string>

namespace headroom {

/// The flags of `headroom plan --chain`.
struct PlanChainOptions {
  std::string chain_path;
  std::string memory_budget;       ///< as for parse_bytes; empty: no limit
  std::string policy = "optimal";  ///< as for parse_policy
  bool frontier = false;           ///< the whole memory/time curve instead of one plan
  bool json = false;
  bool csv = false;  ///< of the frontier
};

/// Plans a chain given as numbers and prints the plan, or the curve, to standard output. Returns
/// the exit code: 0, or 4 when the budget cannot be met (said on standard error, or as JSON on
/// standard output). Throws ConfigError and DataError.
int run_plan_chain(const PlanChainOptions& options);

}  // namespace headroom
