#include <headroom/plan/schedule.h>

namespace headroom {

const char* operation_name(OperationKind kind) {
  switch (kind) {
    case OperationKind::kForward:
      return "forward";
    case OperationKind::kForwardStore:
      return "forward_store";
    case OperationKind::kForwardKeep:
      return "forward_keep";
    case OperationKind::kBackward:
      return "backward";
    case OperationKind::kFree:
      return "free";
  }
  return "";
}

Recompute recompute_of(const ChainCosts& chain, const std::vector<Operation>& operations) {
  Recompute recompute;
  std::vector<bool> ran(chain.stages.size(), false);
  double once_ns = 0;
  for (const StageCosts& stage : chain.stages) once_ns += static_cast<double>(stage.forward_ns);
  for (const Operation& operation : operations) {
    if (operation.kind == OperationKind::kBackward || operation.kind == OperationKind::kFree)
      continue;
    const auto index = static_cast<std::size_t>(operation.stage);
    const StageCosts& stage = chain.stages[index];
    if (ran[index]) {
      ++recompute.num_runs;
      recompute.time_ns +=
          operation.kind == OperationKind::kForwardKeep
              ? stage.options[static_cast<std::size_t>(operation.option)].forward_ns
              : stage.forward_ns;
    }
    ran[index] = true;
  }
  if (once_ns > 0) recompute.fraction = static_cast<double>(recompute.time_ns) / once_ns;
  return recompute;
}

}  // namespace headroom
