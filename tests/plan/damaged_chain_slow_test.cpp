#include <headroom/config/chain_costs.h>

#include <headroom/core/error.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace headroom {
namespace {

/// A small chain as text in which every number was drawn anew, some of them absurd.
std::string damaged_text(std::mt19937_64& random) {
  const char* const numbers[] = {"0",
                                 "1",
                                 "3",
                                 "17",
                                 "4096",
                                 "1e6",
                                 "123456789",
                                 "1125899906842624",
                                 "1125899906842625",
                                 "-1",
                                 "1.5",
                                 "1e300",
                                 "null"};
  const auto number = [&](bool mild) {
    return std::string(numbers[random() % (mild ? 8 : std::size(numbers))]);
  };
  const bool mild = random() % 4 != 0;
  std::string text = "{\"stages\": [";
  const std::size_t num_stages = random() % 6;
  for (std::size_t l = 0; l < num_stages; ++l) {
    text += l == 0 ? "{" : ", {";
    for (const char* key : {"output_bytes", "grad_bytes", "forward_ns", "forward_transient_bytes",
                            "param_grad_bytes"}) {
      text += "\"" + std::string(key) + "\": " + number(mild) + ", ";
    }
    text += "\"options\": [{\"kept_bytes\": " + number(mild) +
            ", \"backward_ns\": " + number(mild) + "}, {\"kept_bytes\": " + number(mild) + "}]}";
  }
  text += "], \"input_grad_bytes\": " + number(mild);
  if (random() % 2 == 0)
    text +=
        ", \"boundary_formats\": [{\"name\": \"f\", \"size_ratio\": 0.5, \"encode_ns_per_byte\": " +
        number(mild) + "}]";
  text += "}";
  if (random() % 8 == 0) text.erase(random() % text.size(), 1 + random() % 3);
  return text;
}

TEST(DamagedChains, AreRefusedOrPlanned) {
  std::mt19937_64 random(1);
  SolverOptions coarse;
  coarse.max_slots = 256;
  coarse.max_lossless_work = 10000;
  int num_planned = 0, num_refused = 0;
  for (int i = 0; i < 10000; ++i) {
    try {
      ChainSolver solver(parse_chain_text(damaged_text(random)), coarse);
      const std::int64_t floor = solver.smallest_budget_bytes(),
                         ample = solver.ample_budget_bytes();
      const std::int64_t budget =
          floor +
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(ample - floor + 1));
      const Schedule plan = solver.schedule(budget);
      EXPECT_LE(plan.peak_bytes, budget);
      const Schedule fixed = schedule_of_policy(solver.chain(), {PolicyKind::kEvery, 0});
      const Schedule ours = solver.schedule(fixed.peak_bytes);
      EXPECT_LE(ours.peak_bytes, fixed.peak_bytes);
      EXPECT_LE(ours.time_ns - ours.certified_gap_ns, fixed.time_ns);
      ++num_planned;
    } catch (const ConfigError&) {
      ++num_refused;
    }
  }
  EXPECT_GT(num_planned, 1000);
  EXPECT_GT(num_refused, 1000);
}

}  // namespace
}  // namespace headroom
