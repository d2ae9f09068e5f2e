#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <string>

#include "support/build_paths.h"

namespace headroom {
namespace {

using nlohmann::json;

struct Output {
  int exit_code;
  std::string text;  ///< standard output
};

/// Runs `headroom plan --chain` on a chain.
Output plan(const std::string& chain_text, const std::string& flags, bool with_errors = false) {
  const std::string path = ::testing::TempDir() + "plan_chain_test.json";
  std::ofstream(path) << chain_text;
  const std::string command = std::string(HEADROOM_BINARY_DIR) + "/bin/headroom plan --chain " +
                              path + " " + flags + (with_errors ? " 2>&1" : " 2>/dev/null");
  Output output{-1, ""};
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> buffer{};
  for (std::size_t count = 0; (count = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    output.text.append(buffer.data(), count);
  const int status = pclose(pipe);
  output.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::remove(path.c_str());
  return output;
}

/// Four equal stages: 6 bytes is the floor, 13 keep everything.
std::string four_stages() {
  json chain;
  for (int l = 1; l <= 4; ++l) {
    chain["stages"].push_back(
        {{"output_bytes", 1},
         {"grad_bytes", l == 4 ? 0 : 1},
         {"forward_ns", 1},
         {"options", {{{"kept_bytes", 3}, {"forward_ns", 1}, {"backward_ns", 2}}}}});
  }
  return chain.dump();
}

TEST(PlanChain, PrintsThePlanAsPromised) {
  const Output output = plan(four_stages(), "--memory_budget 13 --json");
  EXPECT_EQ(output.exit_code, 0);
  const json expected = json::parse(
      R"({"feasible": true, "time_ns": 12, "peak_bytes": 13, "certified_gap_ns": 0, "operations": [
    {"op": "forward_keep", "stage": 1, "option": 0}, {"op": "forward_keep", "stage": 2, "option": 0},
    {"op": "forward_keep", "stage": 3, "option": 0}, {"op": "forward_keep", "stage": 4, "option": 0},
    {"op": "backward", "stage": 4}, {"op": "backward", "stage": 3}, {"op": "backward", "stage": 2}, {"op": "backward", "stage": 1}]})");
  EXPECT_EQ(json::parse(output.text), expected);
}

TEST(PlanChain, StoresRecomputesAndFrees) {
  const Output output = plan(four_stages(), "--memory_budget 100 --policy every --json");
  EXPECT_EQ(output.exit_code, 0);
  const json expected = json::parse(
      R"([{"op": "forward", "stage": 1}, {"op": "forward_store", "stage": 2, "format": "full"},
    {"op": "forward_store", "stage": 3, "format": "full"}, {"op": "forward_keep", "stage": 4, "option": 0}, {"op": "backward", "stage": 4},
    {"op": "free", "stage": 4}, {"op": "forward_keep", "stage": 3, "option": 0}, {"op": "backward", "stage": 3}, {"op": "free", "stage": 3},
    {"op": "forward_keep", "stage": 2, "option": 0}, {"op": "backward", "stage": 2}, {"op": "free", "stage": 2},
    {"op": "forward_keep", "stage": 1, "option": 0}, {"op": "backward", "stage": 1}])");
  EXPECT_EQ(json::parse(output.text)["operations"], expected);
}

TEST(PlanChain, TellsTheSmallestBudgetWhenNothingFits) {
  const Output output = plan(four_stages(), "--memory_budget 5 --json");
  EXPECT_EQ(output.exit_code, 4);
  EXPECT_EQ(json::parse(output.text),
            json::parse(R"({"feasible": false, "smallest_budget_bytes": 6})"));
  const Output words = plan(four_stages(), "--memory_budget 5", true);
  EXPECT_EQ(words.exit_code, 4);
  EXPECT_NE(words.text.find("6 bytes"), std::string::npos) << words.text;
}

TEST(PlanChain, PrintsTheFrontier) {
  const json expected = json::parse("[[6, 16], [7, 15], [8, 14], [11, 13], [13, 12]]");
  const json points =
      json::parse(plan(four_stages(), "--memory_budget 100 --frontier --json").text);
  ASSERT_EQ(points.size(), expected.size());
  for (std::size_t i = 0; i < points.size(); ++i) {
    EXPECT_EQ(points[i], json({{"budget_bytes", expected[i][0]},
                               {"time_ns", expected[i][1]},
                               {"peak_bytes", expected[i][0]}}));
  }
  EXPECT_EQ(plan(four_stages(), "--frontier --csv").text,
            "budget_bytes,time_ns,peak_bytes\n6,16,6\n7,15,7\n8,14,8\n11,13,11\n13,12,13\n");
}

TEST(PlanChain, DrawsAPicture) {
  const std::string text = plan(four_stages(), "--memory_budget 8").text;
  for (const char* part : {"<- peak", "R recomputed", "policy optimal: 14 ns", "peak 8 B"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(PlanChain, RefusesBadInputWithTheRightCode) {
  EXPECT_EQ(plan("{", "--memory_budget 5").exit_code, 2);
  EXPECT_EQ(plan(R"({"stages": []})", "--memory_budget 5").exit_code, 2);
  EXPECT_EQ(plan(four_stages(), "--memory_budget lots").exit_code, 2);
  EXPECT_EQ(plan(four_stages(), "--memory_budget 5 --policy best").exit_code, 2);
  EXPECT_EQ(plan(four_stages(), "--memory_budget 5 --chain /nonexistent.json").exit_code,
            2);  // given twice
}

}  // namespace
}  // namespace headroom
