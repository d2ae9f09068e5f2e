#include "optim/parameter_groups.h"

namespace headroom {

ParameterSplit split_parameters(const OptimizerConfig& config, const NamedParameters& named,
                                const KeepFp32State& keep_fp32_state) {
  ParameterSplit split;
  std::unordered_set<c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : named) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second)
      continue;
    const bool without_decay = parameter.dim() < 2 && !config.decay_biases_and_norms;
    const bool fp32_state = keep_fp32_state != nullptr && keep_fp32_state(name, parameter);
    split.parameters[without_decay ? 1 : 0][fp32_state ? 1 : 0].push_back(parameter);
  }
  return split;
}

}  // namespace headroom
