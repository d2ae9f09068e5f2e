#pragma once

#include <headroom/plan/schedule.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headroom {

/// A long chain as a short one: neighbouring stages form a group, which is one stage of the short
/// chain. A group's options are schedules of its own stages, from the leanest to the fastest, so
/// that what happens inside a group stays near the optimum, and the short chain decides the rest.
class GroupedChain {
 public:
  /// In `num_groups` groups of equal size, or by one stage larger. No stage may carry parts of its
  /// input on.
  GroupedChain(ChainCosts chain, int num_groups);

  const ChainCosts& chain() const { return chain_; }
  const ChainCosts& groups() const { return groups_; }

  /// The operations on stages that operations on groups stand for.
  std::vector<Operation> expand(const std::vector<Operation>& operations) const;

 private:
  /// A schedule of a group's stages, which count from 0 there, cut where its backward begins.
  struct Option {
    std::vector<Operation> forward;
    std::vector<Operation> backward;
  };
  struct Group {
    int first;
    int num_stages;
    std::vector<Option> options;
  };

  void add_group(int first, int num_stages);

  ChainCosts chain_;
  ChainCosts groups_;
  std::vector<Group> parts_;
};

/// No persistent schedule of the chain inside the budget takes less. When the last backward begins,
/// what is kept fits the budget, and every other stage has run once already and must run again: the
/// bound is the best fractional choice of what is kept then. No stage may carry parts of its input
/// on.
std::int64_t least_time_within(const ChainCosts& chain, std::int64_t budget_bytes);

}  // namespace headroom
