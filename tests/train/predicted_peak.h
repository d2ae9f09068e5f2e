#pragma once

#include <headroom/report/results.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace headroom {

/// A run under a budget made these weights, without starting again, in the memory that its plan
/// said, to two percent and `slack_bytes`.
inline void expect_as_predicted(const TrainResults& results, const std::string& weights_sha256,
                                std::int64_t slack_bytes = 0) {
  SCOPED_TRACE("budget " + std::to_string(results.memory_budget_bytes) + ", predicted " +
               std::to_string(results.predicted_peak_bytes) + ", measured " +
               std::to_string(results.peak_memory_bytes));
  EXPECT_EQ(results.weights_sha256, weights_sha256);
  EXPECT_EQ(results.num_recoveries, 0);
  EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
  EXPECT_LE(static_cast<double>(results.predicted_peak_bytes - slack_bytes),
            1.02 * static_cast<double>(results.peak_memory_bytes));
}

}  // namespace headroom
