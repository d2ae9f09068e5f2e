#include "plan/expansion.h"

#include <utility>

namespace headroom {
namespace {

class Expander {
 public:
  explicit Expander(const Decide& decide) : decide_(decide) {}

  /// What holds the input of an interval.
  enum class Input {
    kHead,   ///< nothing yet
    kSlot,   ///< a slot of its own, to be freed after the backward of `first`
    kOther,  ///< the chain, or the kept stage before
  };

  void expand(const Interval& interval, Input input) {
    if (interval.first > interval.last) return;
    const Decision decision = decide_(interval);
    const int first = interval.first;
    if (decision.split == Decision::kNoSplit) {
      operations_.push_back({OperationKind::kForwardKeep, first, decision.option, interval.format});
      expand({first + 1, interval.last, 0, decision.right_state}, Input::kOther);
      operations_.push_back({OperationKind::kBackward, first, decision.option, interval.format});
      if (input != Input::kOther)
        operations_.push_back({OperationKind::kFree, first, 0, interval.format});
      return;
    }
    operations_.push_back(
        {input == Input::kHead ? OperationKind::kForwardStore : OperationKind::kForward, first, 0,
         interval.format});
    for (int stage = first + 1; stage < decision.split; ++stage)
      operations_.push_back({OperationKind::kForward, stage, 0, 0});
    expand({decision.split, interval.last, decision.format, decision.right_state}, Input::kHead);
    expand({first, decision.split - 1, interval.format, decision.left_state},
           input == Input::kHead ? Input::kSlot : input);
  }

  std::vector<Operation> take() { return std::move(operations_); }

 private:
  const Decide& decide_;
  std::vector<Operation> operations_;
};

}  // namespace

std::vector<Operation> expand_schedule(int num_stages, std::int64_t state, const Decide& decide) {
  Expander expander(decide);
  expander.expand({0, num_stages - 1, 0, state}, Expander::Input::kOther);
  return expander.take();
}

}  // namespace headroom
