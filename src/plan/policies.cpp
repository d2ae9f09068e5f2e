#include <headroom/plan/schedule.h>

#include "plan/expansion.h"
#include "plan/segments.h"

#include <headroom/core/error.h>
#include "plan/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace headroom {
namespace {

struct PolicyName {
  const char* name;
  PolicyKind kind;
  bool has_count;
};
constexpr PolicyName kPolicyNames[] = {
    {"optimal", PolicyKind::kOptimal, false}, {"none", PolicyKind::kNone, false},
    {"every", PolicyKind::kEvery, false},     {"segments", PolicyKind::kSegments, true},
    {"sqrt", PolicyKind::kSqrt, false},       {"log", PolicyKind::kLog, false},
    {"revolve", PolicyKind::kRevolve, true}};

Decide segments(int num_stages, int num_segments) {
  return [num_stages, num_segments](const Interval& interval) {
    const std::int64_t segment = segment_of(num_stages, num_segments, interval.first);
    const auto next = static_cast<int>(segment_begin(num_stages, num_segments, segment + 1));
    return next <= interval.last ? Decision::sweep(next) : Decision::keep(0);
  };
}

Decide halves() {
  return [](const Interval& interval) {
    const int length = interval.last - interval.first + 1;
    return length == 1 ? Decision::keep(0)
                       : Decision::sweep(interval.first + static_cast<int>(first_half(length)));
  };
}

/// Griewank and Walther's count of extra forwards for n equal steps with c snapshots beside the
/// input: r n - binomial(c + r, c + 1) with binomial(c + r - 1, c) < n <= binomial(c + r, c).
std::int64_t revolve_extra_forwards(std::int64_t n, std::int64_t c) {
  if (n <= 1) return 0;
  std::int64_t r = 0;
  std::int64_t reach = 1;      // binomial(c + r, c)
  std::int64_t below_sum = 0;  // binomial(c + r, c + 1)
  while (reach < n) {
    below_sum += reach;
    ++r;
    reach = reach * (c + r) / r;
  }
  return r * n - below_sum;
}

/// The state of an interval is the number of snapshots that it may still take.
Decide revolve() {
  return [](const Interval& interval) {
    const int length = interval.last - interval.first + 1;
    if (length == 1) return Decision::keep(0);
    const std::int64_t snapshots = interval.state;
    int best_split = interval.first + 1;
    std::int64_t best = std::numeric_limits<std::int64_t>::max();
    // With one snapshot only the last stage can follow it.
    for (int sweep = snapshots == 1 ? length - 1 : 1; sweep < length; ++sweep) {
      const std::int64_t extra =
          sweep + (snapshots == 1 ? 0 : revolve_extra_forwards(length - sweep, snapshots - 1)) +
          revolve_extra_forwards(sweep, snapshots);
      if (extra < best) {
        best = extra;
        best_split = interval.first + sweep;
      }
    }
    return Decision::sweep(best_split, 0, snapshots - 1, snapshots);
  };
}

}  // namespace

std::string Policy::to_string() const {
  const auto found = std::find_if(std::begin(kPolicyNames), std::end(kPolicyNames),
                                  [this](const PolicyName& entry) { return entry.kind == kind; });
  return found->has_count ? fmt::format("{}={}", found->name, count) : found->name;
}

Policy parse_policy(std::string_view text) {
  const std::size_t equals = std::min(text.find('='), text.size());
  const std::string_view name = text.substr(0, equals);
  const std::string_view number =
      equals < text.size() ? text.substr(equals + 1) : std::string_view();
  for (const PolicyName& entry : kPolicyNames) {
    if (name != entry.name || entry.has_count != (equals < text.size())) continue;
    Policy policy{entry.kind, 0};
    if (!entry.has_count) return policy;
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), policy.count);
    if (error == std::errc() && end == number.data() + number.size() && policy.count >= 1)
      return policy;
  }
  throw ConfigError(
      fmt::format("'{}' is not a policy; choose optimal, none, every, segments=K, sqrt, log or "
                  "revolve=C with K, C from 1 up",
                  text));
}

Schedule schedule_of_policy(const ChainCosts& chain, const Policy& policy) {
  validate(chain);
  const int num_stages = static_cast<int>(chain.stages.size());
  const auto expand = [&](const Decide& decide, std::int64_t state = 0) {
    return schedule_from_operations(chain, expand_schedule(num_stages, state, decide));
  };
  switch (policy.kind) {
    case PolicyKind::kOptimal:
      break;
    case PolicyKind::kNone:
      return expand(segments(num_stages, 1));
    case PolicyKind::kEvery:
      return expand(segments(num_stages, num_stages));
    case PolicyKind::kSegments:
      if (policy.count > num_stages) {
        throw ConfigError(fmt::format("{} asks for more segments than the chain has stages ({})",
                                      policy.to_string(), num_stages));
      }
      return expand(segments(num_stages, policy.count));
    case PolicyKind::kSqrt:
      return expand(segments(num_stages, static_cast<int>(num_sqrt_segments(num_stages))));
    case PolicyKind::kLog:
      return expand(halves());
    case PolicyKind::kRevolve:
      // More snapshots than boundaries change nothing.
      return expand(revolve(), std::min(policy.count, std::max(num_stages - 1, 1)));
  }
  throw std::invalid_argument("the optimal policy needs a budget: use ChainSolver");
}

}  // namespace headroom
