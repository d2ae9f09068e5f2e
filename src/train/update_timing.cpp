#include "train/update_timing.h"

#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>
#include "memory/device_clock.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <vector>

namespace headroom {
namespace {

std::optional<std::int64_t> time_update_of_a_part(const NamedParameters& parameters,
                                                  const OptimizerConfig& config,
                                                  double max_grad_norm, std::size_t enough_bytes) {
  constexpr int kNumRuns = 3;
  const OwnerScope owner(Owner::kOther);
  std::size_t all_bytes = 0;
  std::size_t bytes = 0;
  std::int64_t fastest_ns = std::numeric_limits<std::int64_t>::max();
  try {
    NamedParameters stand_ins;
    std::vector<at::Tensor> gradients;
    for (const auto& [name, parameter] : parameters) {
      all_bytes += parameter.nbytes();
      if (bytes >= enough_bytes) continue;
      bytes += parameter.nbytes();
      stand_ins.emplace_back(name, torch::zeros_like(parameter).requires_grad_(true));
      gradients.push_back(
          torch::full_like(parameter, 1e-3, torch::TensorOptions().requires_grad(false)));
      stand_ins.back().second.mutable_grad() = gradients.back();
    }
    const std::unique_ptr<LeanOptimizer> stand_in = make_optimizer(config, stand_ins);
    stand_in->prepare_state();
    for (int run = 0; run <= kNumRuns; ++run) {
      const auto start = DeviceClock::now();
      clip_global_norm(gradients, max_grad_norm);
      stand_in->step();
      const std::int64_t ns =
          std::chrono::duration_cast<std::chrono::nanoseconds>(DeviceClock::now() - start).count();
      if (run > 0)
        fastest_ns = std::min(fastest_ns, ns);  // the first one meets memory that was never touched
    }
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(static_cast<double>(fastest_ns) *
                                   static_cast<double>(all_bytes) / static_cast<double>(bytes));
}

}  // namespace

std::optional<std::int64_t> time_update(const NamedParameters& parameters,
                                        const OptimizerConfig& config, double max_grad_norm) {
  for (const std::size_t enough_bytes :
       {std::size_t{16} << 20, std::size_t{4} << 20, std::size_t{1} << 20}) {
    if (const std::optional<std::int64_t> ns =
            time_update_of_a_part(parameters, config, max_grad_norm, enough_bytes))
      return ns;
  }
  return std::nullopt;
}

}  // namespace headroom
