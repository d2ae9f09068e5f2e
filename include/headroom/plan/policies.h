#pragma once

#include <headroom/plan/schedule.h>

#include <string>
#include <string_view>

namespace headroom {

enum class PolicyKind {
  kOptimal,   ///< the fastest plan that fits, by ChainSolver
  kNone,      ///< keeps everything
  kEvery,     ///< keeps every boundary, recomputes every stage but the last
  kSegments,  ///< keeps the boundaries of K segments of equal size, or by one stage larger, as
              ///< checkpoint_sequential cuts them; recomputes all but the last segment
  kSqrt,      ///< kSegments with K = round(sqrt(number of stages))
  kLog,      ///< halves recursively: about log2(n) boundaries at a time, log2(n) / 2 extra forwards
  kRevolve,  ///< C snapshots, placed binomially: the fewest extra forwards for equal stages
};

struct Policy {
  PolicyKind kind = PolicyKind::kOptimal;
  int count = 0;  ///< K of segments, C of revolve

  /// As it was written: "segments=4".
  std::string to_string() const;
};

/// Reads "optimal", "none", "every", "segments=K", "sqrt", "log" or "revolve=C" with K, C >= 1.
/// Throws ConfigError, listing them, on anything else.
Policy parse_policy(std::string_view text);

/// The plan of a fixed policy, with the first option of each stage and boundaries held as they are.
/// It knows no budget: compare its peak_bytes. Throws ConfigError when the policy does not suit the
/// chain (more segments than stages) and std::invalid_argument for kOptimal, which needs one.
Schedule schedule_of_policy(const ChainCosts& chain, const Policy& policy);

}  // namespace headroom
