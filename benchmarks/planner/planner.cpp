// What the planner gains over fixed policies, as the table of docs/planning.md, and how fast it is
// itself.
#include "plan/realistic_chains.h"

#include <headroom/core/bytes.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>
#include <headroom/plan/search.h>

#include <fmt/format.h>
#include <sys/resource.h>

#include <cstdio>
#include <ctime>
#include <functional>
#include <random>
#include <string>

namespace headroom {
namespace {

/// Of this process's CPU: the planner has one thread, and its neighbours do not count.
double seconds_of(const std::function<void()>& work) {
  const std::clock_t start = std::clock();
  work();
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

void compare(const char* name, const ChainCosts& chain) {
  ChainSolver solver(chain);
  const double least = static_cast<double>(solver.least_time_ns());
  for (const char* text : {"none", "every", "segments=4", "sqrt", "log", "revolve=4"}) {
    const Schedule fixed = schedule_of_policy(chain, parse_policy(text));
    const Schedule ours = solver.schedule(fixed.peak_bytes);
    const double gap =
        100 * static_cast<double>(ours.certified_gap_ns) / static_cast<double>(ours.time_ns);
    std::printf("| %s | %s | %s | +%.1f%% | +%.1f%% | %.2f%% |\n", name, text,
                format_bytes(fixed.peak_bytes).c_str(),
                100 * (static_cast<double>(fixed.time_ns) / least - 1),
                100 * (static_cast<double>(ours.time_ns) / least - 1), gap);
  }
}

/// Different stages with sizes in whole slots; the budget has `num_slots` of them.
ChainCosts different_stages(int num_stages, int num_options, std::int64_t slot_bytes) {
  std::mt19937_64 random(7);
  const auto draw = [&](int low, int high) {
    return static_cast<std::int64_t>(
        low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)));
  };
  ChainCosts chain;
  for (int l = 1; l <= num_stages; ++l) {
    const std::int64_t output = draw(2, 10), forward = draw(1000, 9000);
    StageCosts stage{"",
                     output * slot_bytes,
                     l == num_stages ? 0 : output * slot_bytes,
                     forward,
                     draw(0, 4) * slot_bytes,
                     0,
                     {},
                     {}};
    for (int k = 0; k < num_options; ++k) {
      stage.options.push_back({(output + draw(0, 30)) * slot_bytes, forward,
                               2 * forward + draw(0, 5000), draw(0, 4) * slot_bytes,
                               draw(0, 8) * slot_bytes});
    }
    chain.stages.push_back(stage);
  }
  return chain;
}

/// `limit_seconds` is what the project asks for; 0: shown without a limit.
void time_solver(const char* name, const ChainCosts& chain, std::int64_t budget_bytes,
                 double limit_seconds) {
  Schedule plan;
  const double seconds = seconds_of([&] { plan = ChainSolver(chain).schedule(budget_bytes); });
  const std::string limit = limit_seconds > 0 ? fmt::format("(limit {} s)", limit_seconds) : "";
  std::printf("%-50s %7.3f s %-15s gap %.2f%%\n", name, seconds, limit.c_str(),
              100 * static_cast<double>(plan.certified_gap_ns) / static_cast<double>(plan.time_ns));
}

void time_joint_search(std::int64_t budget_bytes) {
  PlanRequest request;
  request.budget_bytes = budget_bytes;
  request.num_samples = 512;
  const std::int64_t weights = std::int64_t{124439808} * 4;
  request.choices = {
      {GradientMode::kPreallocated, {weights, weights, 2 * weights, 0}, 300000000, 0, 0},
      {GradientMode::kPreallocated,
       {weights, weights, weights / 2 + weights / 64, 0},
       350000000,
       0,
       0},
      {GradientMode::kUpdatedInBackward, {weights, 0, 2 * weights, 0}, 300000000, 0, 1}};
  const char* const names[] = {"adamw", "adamw_8bit", "adamw, in backward"};
  request.costs = [](std::int64_t size, const StaticChoice& choice) {
    const ChainCosts chain = testing::gpt2_chain(size);
    return MicroBatchCosts{choice.max_accumulation_steps == 1 ? with_update_in_backward(chain)
                                                              : with_gradients_allocated(chain),
                           size * 1024 * 16};
  };
  BatchPlan plan;
  const double seconds = seconds_of([&] { plan = make_plan(request); });
  std::printf(
      "joint search, GPT-2, 512 samples, %-16s %7.3f s (limit 5 s)  %lld x %lld, %s, %d of %d "
      "solved, gap %.2f%%\n",
      format_bytes(budget_bytes).c_str(), seconds,
      static_cast<long long>(plan.micro_batches[0].size),
      static_cast<long long>(plan.accumulation_steps), names[plan.choice], plan.num_solved,
      plan.num_candidates,
      100 * static_cast<double>(plan.certified_gap_ns) / static_cast<double>(plan.time_ns));
}

void run() {
  std::printf(
      "| chain | policy | peak | its time | ours at that peak | gap "
      "|\n|---|---|---|---|---|---|\n");
  compare("GPT-2 124M, 4 x 1024", testing::gpt2_chain(4));
  compare("ResNet-50-like, 32", testing::resnet50_like_chain(32));
  compare("U-shaped, 25 stages", testing::u_shaped_chain(4));
  compare("1000 equal blocks", testing::equal_blocks_chain(1000));
  std::printf("\nspeed, one thread:\n");
  const std::int64_t slot = std::int64_t{1} << 20;
  time_solver("100 different stages, 500 slots, 4 options", different_stages(100, 4, slot),
              500 * slot, 0.15);
  time_solver("200 different stages, 500 slots, 4 options", different_stages(200, 4, slot),
              500 * slot, 1);
  time_solver("1000 equal stages, 1000 slots, 8 options", testing::equal_blocks_chain(1000, 8),
              1000 * slot, 2);
  time_solver("200 different stages, 4000 slots, 4 options", different_stages(200, 4, slot / 8),
              500 * slot, 0);
  time_solver("500 different stages, 500 slots, 4 options", different_stages(500, 4, slot),
              500 * slot, 0);
  time_solver("4096 different stages, 4096 slots, 4 options", different_stages(4096, 4, slot),
              4096 * slot, 10);
  for (const std::int64_t mib : {2500, 4000, 8000, 16000, 64000}) time_joint_search(mib << 20);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("peak memory of this process: %s (limit 1 GiB)\n",
              format_bytes(std::int64_t{usage.ru_maxrss} * 1024).c_str());
}

}  // namespace
}  // namespace headroom

int main() { headroom::run(); }
