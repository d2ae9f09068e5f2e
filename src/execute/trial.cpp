#include "execute/trial.h"

#include <headroom/memory/meter.h>
#include "memory/device_clock.h"

#include "execute/stage_run.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>

namespace headroom {
namespace {

void clear_gradients(const Chain& chain) {
  for (at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
}

}  // namespace

std::optional<std::int64_t> time_operations(const Chain& chain, const MicroBatch& micro,
                                            const std::vector<Operation>& operations,
                                            const ExecutorOptions& options, bool gradients_appear,
                                            std::int64_t enough_ns) {
  constexpr std::size_t kMostRuns = 7;
  std::vector<std::unique_ptr<RecomputeScope>> as_before;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    as_before.push_back(
        std::make_unique<RecomputeScope>(chain.stage(i), StageState::record(chain.stage(i))));
  }
  Executor executor(chain, options);
  clear_gradients(chain);
  std::vector<std::int64_t> runs_ns;
  std::int64_t spent_ns = 0;
  try {
    while (runs_ns.size() < kMostRuns && spent_ns < enough_ns) {
      if (gradients_appear) clear_gradients(chain);
      const auto start = DeviceClock::now();
      executor.accumulate(micro, operations,
                          1.0 / static_cast<double>(std::max<std::int64_t>(micro.num_items, 1)));
      runs_ns.push_back(
          std::chrono::duration_cast<std::chrono::nanoseconds>(DeviceClock::now() - start).count());
      spent_ns += runs_ns.back();
    }
  } catch (const c10::OutOfMemoryError&) {
    runs_ns.clear();
  } catch (...) {
    release_failed_backward();
    clear_gradients(chain);
    throw;
  }
  if (runs_ns.empty()) release_failed_backward();
  clear_gradients(chain);
  if (runs_ns.empty()) return std::nullopt;
  const auto middle = runs_ns.begin() + static_cast<std::ptrdiff_t>(runs_ns.size() / 2);
  std::nth_element(runs_ns.begin(), middle, runs_ns.end());
  return *middle;
}

}  // namespace headroom
