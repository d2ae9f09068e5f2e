#include <headroom/report/results.h>

#include "report/json.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace headroom {
namespace {

TEST(TrainResults, HasEveryKeyThatIsPromised) {
  TrainResults results;
  results.eval = EvalResults();
  results.eval->loss = 0.5;
  results.eval->accuracy = 0.9;
  results.eval->num_samples = 100;
  results.peak_bytes_by_owner = {{"weights", 1}, {"gradients", 2}};
  const auto json = nlohmann::json::parse(to_json(results).dump());
  for (const char* key : {"train_runtime",
                          "train_samples_per_second",
                          "train_steps_per_second",
                          "train_loss",
                          "epoch",
                          "global_step",
                          "eval_loss",
                          "eval_accuracy",
                          "peak_memory_bytes",
                          "peak_activation_bytes",
                          "peak_rss_bytes",
                          "memory_budget_bytes",
                          "predicted_peak_bytes",
                          "predicted_step_seconds",
                          "measured_step_seconds",
                          "micro_batch_size",
                          "gradient_accumulation_steps",
                          "world_size",
                          "recomputed_forward_fraction",
                          "peak_bytes_by_owner",
                          "num_skipped_updates",
                          "num_parameters",
                          "weights_sha256"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["peak_bytes_by_owner"]["gradients"], 2);
  EXPECT_EQ(json["eval_accuracy"], 0.9);
}

TEST(TrainResults, HasNoEvaluationWhereThereWasNone) {
  const auto json = nlohmann::json::parse(to_json(TrainResults{}).dump());
  EXPECT_FALSE(json.contains("eval_loss"));
  EXPECT_FALSE(json.contains("eval_accuracy"));
}

}  // namespace
}  // namespace headroom
