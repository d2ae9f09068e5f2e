#include "plan/oracle_comparison.h"

#include <gtest/gtest.h>

#include <random>

namespace headroom {
namespace {

TEST(ChainSolverOracle, SmallNumbersGiveManyTies) {
  std::mt19937_64 random(11);
  testing::compare_with_oracle(random, 1500, {6, 3, 2, 4, 4});
}

TEST(ChainSolverOracle, EverythingAtOnce) {
  std::mt19937_64 random(12);
  testing::compare_with_oracle(random, 2000, {6, 3, 2, 16, 16});
}

TEST(ChainSolverOracle, SweepsThatDecideWhatFits) {
  std::mt19937_64 random(15);
  testing::compare_with_oracle(random, 1500, {6, 2, 2, 16, 16, true});
}

TEST(ChainSolverOracle, WithoutFormats) {
  std::mt19937_64 random(13);
  testing::compare_with_oracle(random, 1500, {6, 3, 0, 40, 40});
}

TEST(ChainSolverOracle, ManyDifferentSizes) {
  std::mt19937_64 random(14);
  testing::compare_with_oracle(random, 500, {6, 3, 2, 1000, 1000});
}

}  // namespace
}  // namespace headroom
