#include "train/evaluator.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>

#include "train/stop.h"
#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

class EvaluatorTest : public ::testing::Test {
 protected:
  Evaluator make_evaluator(const std::shared_ptr<const Dataset>& data) {
    return Evaluator(settings_, chain_of(network_), data);
  }

  RunSettings settings_{plain_arguments("unused"), 1};
  RankGroup ranks_{nullptr};
  torch::nn::Sequential network_ = make_noisy_network(5);
};

TEST_F(EvaluatorTest, LeavesEveryModuleInItsMode) {
  network_->train();
  network_[1]->as<torch::nn::BatchNorm1d>()->eval();  // frozen statistics
  const auto data = make_data();
  make_evaluator(data).run(ranks_, 4);
  EXPECT_TRUE(network_[3]->as<torch::nn::Dropout>()->is_training());
  EXPECT_FALSE(network_[1]->as<torch::nn::BatchNorm1d>()->is_training());
  data->on_load = [](c10::ArrayRef<std::int64_t>) { throw DataError("unreadable"); };
  EXPECT_THROW(make_evaluator(data).run(ranks_, 4), DataError);
  EXPECT_TRUE(network_[3]->as<torch::nn::Dropout>()->is_training()) << "after an error, too";
  EXPECT_FALSE(network_[1]->as<torch::nn::BatchNorm1d>()->is_training());
}

TEST_F(EvaluatorTest, DataThatDoesNotFitTheModelIsFoundByOneSample) {
  make_evaluator(make_data()).check_data();
  make_evaluator(nullptr).check_data();
  EXPECT_THROW(make_evaluator(std::make_shared<TableData>(5, kWidth + 1, kClasses, 1)).check_data(),
               DataError);
  const RandomState random = RandomState::capture();
  const double next = torch::rand({1}).item<double>();
  random.restore();
  make_evaluator(make_data()).check_data();
  EXPECT_EQ(torch::rand({1}).item<double>(), next) << "random numbers stay what they were";
}

TEST_F(EvaluatorTest, IsDueAsTheStrategySays) {
  const auto due = [&](const std::string& strategy, std::int64_t update, double epochs) {
    TrainingArguments arguments = plain_arguments("unused");
    arguments.eval_strategy = strategy;
    arguments.eval_steps = 3;
    const RunSettings settings(arguments, 1);
    return Evaluator(settings, chain_of(network_), make_data()).is_due(update, epochs);
  };
  EXPECT_FALSE(due("no", 3, 1.0));
  EXPECT_TRUE(due("steps", 3, 0.5));
  EXPECT_FALSE(due("steps", 4, 1.0));
  EXPECT_TRUE(due("epoch", 4, 1.0));
  EXPECT_FALSE(due("epoch", 3, 0.5));
  Evaluator evaluator = make_evaluator(make_data());
  EXPECT_TRUE(evaluator.is_due_at_end(9));
  evaluator.run_after(9, ranks_, 4);
  EXPECT_FALSE(evaluator.is_due_at_end(9));
  EXPECT_FALSE(make_evaluator(nullptr).is_due_at_end(9));
}

TEST_F(EvaluatorTest, StopsOnRequest) {
  const StopScope stop_scope;
  const auto data = make_data();
  int num_loaded = 0;
  data->on_load = [&](c10::ArrayRef<std::int64_t>) {
    if (++num_loaded == 2) request_stop();
  };
  EXPECT_THROW(make_evaluator(data).run(ranks_, 4), Stopped);
  EXPECT_EQ(num_loaded, 2);
}

}  // namespace
}  // namespace headroom
