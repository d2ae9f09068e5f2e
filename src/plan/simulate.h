#pragma once

#include <headroom/plan/schedule.h>

#include <string>
#include <vector>

namespace headroom {

/// What a list of operations costs when it is carried out, in exact bytes and nanoseconds.
struct Replay {
  /// Why the list cannot be carried out, naming the operation; empty when it can.
  std::string problem;
  std::int64_t time_ns = 0;
  std::int64_t peak_bytes = 0;
  std::size_t peak_operation = 0;
  std::vector<OperationBytes> curve;

  bool valid() const { return problem.empty(); }
};

/// Carries out `operations` on numbers, by the meaning that schedule.h gives them. A list is valid
/// when every operation finds what it needs, only the head and what its backward has used are
/// dropped, and at the end the gradient of the chain's input is there and nothing else is held.
Replay simulate(const ChainCosts& chain, const std::vector<Operation>& operations);

/// Lets operations find their input where decoding it can go on beside the operation before, and
/// where the budget has room: as long as a schedule's decisions stay, it can only become faster.
Schedule with_found_inputs(const ChainCosts& chain, Schedule plan, std::int64_t budget_bytes);

/// The plan of a list that must be valid; throws std::logic_error when it is not.
Schedule schedule_from_operations(const ChainCosts& chain, std::vector<Operation> operations);

}  // namespace headroom
