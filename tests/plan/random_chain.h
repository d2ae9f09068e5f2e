#pragma once

#include <headroom/config/chain_costs.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>

namespace headroom::testing {

struct RandomChainLimits {
  int max_stages = 6;
  int max_options = 3;
  int max_formats = 2;
  std::int64_t max_bytes = 12;
  std::int64_t max_ns = 12;
  /// Options keep little more than the output and forwards need much meanwhile, so that sweeps
  /// decide what fits.
  bool lean_options = false;
  /// Up to this many parts of outputs are carried over several stages.
  int max_skips = 0;
};

inline ChainCosts random_chain(std::mt19937_64& random, const RandomChainLimits& limits) {
  const auto upto = [&](std::int64_t max) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(max + 1));
  };
  const auto sometimes = [&](std::int64_t value) { return random() % 3 == 0 ? 0 : value; };
  const std::int64_t max_extra = limits.lean_options ? limits.max_bytes / 6 : 2 * limits.max_bytes;
  const std::int64_t max_sweep_transient =
      limits.lean_options ? limits.max_bytes : limits.max_bytes / 3;
  ChainCosts chain;
  const std::int64_t num_stages = 1 + upto(limits.max_stages - 1);
  const bool params_appear = random() % 2 == 0;
  for (std::int64_t l = 1; l <= num_stages; ++l) {
    StageCosts stage;
    stage.name = "s" + std::to_string(l);
    stage.output_bytes = upto(limits.max_bytes);
    stage.grad_bytes = l == num_stages && random() % 4 != 0
                           ? 0
                           : (random() % 2 == 0 ? stage.output_bytes : upto(limits.max_bytes));
    stage.forward_ns = upto(limits.max_ns);
    stage.forward_transient_bytes = sometimes(upto(max_sweep_transient));
    stage.param_grad_bytes = params_appear ? sometimes(upto(limits.max_bytes / 2)) : 0;
    const std::int64_t num_options = 1 + upto(limits.max_options - 1);
    for (std::int64_t k = 0; k < num_options; ++k) {
      stage.options.push_back({stage.output_bytes + upto(max_extra), upto(limits.max_ns),
                               upto(2 * limits.max_ns), sometimes(upto(limits.max_bytes / 3)),
                               sometimes(upto(limits.max_bytes / 3))});
    }
    chain.stages.push_back(stage);
  }
  for (std::int64_t skip = upto(limits.max_skips); skip > 0 && num_stages > 2; --skip) {
    const std::int64_t maker = 1 + upto(num_stages - 3),
                       last = maker + 1 + upto(num_stages - 2 - maker);
    const std::int64_t bytes = 1 + upto(limits.max_bytes);
    StageCosts& made = chain.stages[static_cast<std::size_t>(maker - 1)];
    made.output_bytes += bytes;
    for (StageOption& option : made.options) option.kept_bytes += bytes;
    for (std::int64_t l = maker + 1; l <= last; ++l) {
      StageCosts& stage = chain.stages[static_cast<std::size_t>(l - 1)];
      stage.output_bytes += bytes;
      stage.carried.push_back({static_cast<int>(l - maker), bytes});
    }
  }
  for (std::size_t l = 1; l < chain.stages.size() && limits.max_skips > 0; ++l) {
    const std::int64_t most = std::min(chain.stages[l].grad_bytes, chain.stages[l - 1].grad_bytes);
    chain.stages[l].carried_grad_bytes = sometimes(upto(most));
  }
  chain.input_grad_bytes = random() % 3 == 0 ? upto(limits.max_bytes) : 0;
  const std::int64_t num_formats = upto(limits.max_formats);
  const double ratios[] = {0.5, 0.25, 0};
  for (std::int64_t q = 0; q < num_formats; ++q) {
    chain.boundary_formats.push_back({"f" + std::to_string(q), ratios[random() % 3],
                                      0.25 * static_cast<double>(upto(4)),
                                      0.25 * static_cast<double>(upto(4))});
  }
  return chain;
}

}  // namespace headroom::testing
