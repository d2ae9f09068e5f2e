#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <set>
#include <sstream>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/optim/optimizer.h>
#include "optim/adafactor.h"
#include "optim/adam.h"
#include "optim/optimizer_table.h"
#include "optim/reference.h"

namespace headroom {
namespace {

using testing::ReferencePair;
using testing::Shapes;

const Shapes kShapes = {{50, 200}, {33, 5}, {200}, {17, 3, 3, 3}, {4099}, {}};

OptimizerConfig config_of(const std::string& name, double momentum = 0) {
  OptimizerConfig config;
  config.name = name;
  config.learning_rate = 1e-2;
  config.weight_decay = 0.1;
  config.momentum = momentum;
  return config;
}

NamedParameters named(const std::vector<at::Tensor>& parameters) {
  NamedParameters result;
  for (const auto& parameter : parameters)
    result.emplace_back("p" + std::to_string(result.size()), parameter);
  return result;
}

class EveryOptimizer : public ::testing::TestWithParam<std::pair<std::string, double>> {
 protected:
  OptimizerConfig config() const { return config_of(GetParam().first, GetParam().second); }
};

// Each row of the table, and sgd also with state.
std::vector<std::pair<std::string, double>> names_and_momentum() {
  std::vector<std::pair<std::string, double>> all = {{"sgd", 0.9}};
  for (const std::string& name : optimizer_names()) all.emplace_back(name, 0.0);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Optim, EveryOptimizer, ::testing::ValuesIn(names_and_momentum()));

TEST_P(EveryOptimizer, ContinuesBitByBitAfterSaveAndLoad) {
  ReferencePair pair(kShapes);
  auto ours = make_optimizer(config(), named(pair.ours));
  auto theirs = make_optimizer(config(), named(pair.theirs));
  for (int step = 0; step < 20; ++step) {
    pair.give_gradients(step);
    ours->step();
    theirs->step();
  }
  ours->param_groups()[0].options().set_lr(
      3e-3);  // as a scheduler does: the archive must bring it back
  theirs->param_groups()[0].options().set_lr(3e-3);
  std::stringstream archive;
  torch::save(*ours, archive);
  auto restored = make_optimizer(config(), named(pair.ours));
  torch::load(*restored, archive);
  EXPECT_DOUBLE_EQ(restored->param_groups()[0].options().get_lr(), 3e-3);
  EXPECT_EQ(restored->state_bytes(), ours->state_bytes());
  for (int step = 20; step < 40; ++step) {
    pair.give_gradients(step);
    restored->step();
    theirs->step();
  }
  EXPECT_TRUE(pair.identical());
}

TEST_P(EveryOptimizer, EqualRunsGiveEqualArchives) {
  ReferencePair pair(kShapes);
  auto ours = make_optimizer(config(), named(pair.ours));
  auto theirs = make_optimizer(config(), named(pair.theirs));
  pair.give_gradients(0);
  ours->step();
  theirs->step();
  std::stringstream first;
  std::stringstream second;
  torch::save(*ours, first);
  torch::save(*theirs, second);
  EXPECT_EQ(first.str(), second.str());
}

TEST_P(EveryOptimizer, StateBytesAreWhatTheMeterCounts) {
  auto& meter = MemoryMeter::instance();
  ReferencePair pair(kShapes);
  auto optimizer = make_optimizer(config(), named(pair.ours));
  const auto optimizer_bytes = [&meter]() {
    return meter.use().live_by_owner[static_cast<std::size_t>(Owner::kOptimizer)];
  };
  const std::int64_t before = optimizer_bytes();
  {
    const OwnerScope scope(Owner::kOptimizer);
    optimizer->prepare_state();
  }
  const std::int64_t expected = optimizer_state_bytes(config(), kShapes);
  EXPECT_EQ(optimizer_bytes() - before, expected);
  EXPECT_EQ(optimizer->state_bytes(), expected);
}

TEST_P(EveryOptimizer, NothingIsAllocatedAfterPrepareState) {
  auto& meter = MemoryMeter::instance();
  ReferencePair pair(Shapes{{1000, 300}, {300}, {3, 8200}});
  auto optimizer = make_optimizer(config(), named(pair.ours));
  optimizer->prepare_state();
  pair.give_gradients(0);
  meter.reset_peak();
  const std::int64_t before = meter.live_bytes();
  optimizer->step();
  EXPECT_EQ(meter.peak_bytes(), before);
  EXPECT_EQ(meter.live_bytes(), before);
}

TEST_P(EveryOptimizer, OutOfMemoryLeavesTheParametersAsTheyWere) {
  auto& meter = MemoryMeter::instance();
  ReferencePair pair(Shapes{{100, 100}, {100, 100}, {5000}});
  auto optimizer = make_optimizer(config(), named(pair.ours));
  if (optimizer_state_bytes(config(), {{100, 100}}) == 0) GTEST_SKIP() << "no state";
  pair.give_gradients(0);
  meter.set_cap(meter.live_bytes() + optimizer_state_bytes(config(), {{100, 100}}) + 64);
  EXPECT_ANY_THROW(optimizer->step());
  meter.set_cap(0);
  EXPECT_TRUE(pair.identical());
  auto fresh = make_optimizer(config(), named(pair.theirs));
  optimizer->step();
  fresh->step();
  EXPECT_TRUE(pair.identical());
}

TEST_P(EveryOptimizer, SteppingParameterByParameterIsTheSame) {
  ReferencePair pair(kShapes);
  auto ours = make_optimizer(config(), named(pair.ours));
  auto theirs = make_optimizer(config(), named(pair.theirs));
  for (int step = 0; step < 5; ++step) {
    pair.give_gradients(step);
    theirs->step();
    for (std::size_t group = ours->param_groups().size(); group-- > 0;) {
      for (auto& parameter : ours->param_groups()[group].params())
        ours->step_parameter(parameter, group);
    }
  }
  EXPECT_TRUE(pair.identical());
}

TEST(LeanOptimizer, RefusesTheArchiveOfAnotherRun) {
  ReferencePair pair(Shapes{{8, 4}, {4}});
  AdamW saved(pair.ours);
  pair.give_gradients(0);
  saved.step();
  std::stringstream archive;
  torch::save(saved, archive);
  const auto refuses = [&archive](auto&& optimizer) {
    std::stringstream copy(archive.str());
    EXPECT_THROW(torch::load(optimizer, copy), SnapshotError);
  };
  const auto zeros = [](const std::vector<std::int64_t>& shape) {
    return torch::zeros(shape, torch::requires_grad());
  };
  refuses(Adam(pair.ours));
  refuses(AdamW(std::vector<at::Tensor>{pair.ours[0]}));
  refuses(AdamW(std::vector<at::Tensor>{zeros({4, 8}), zeros({4})}));
  refuses(AdamW(std::vector<at::Tensor>{zeros({8, 4}).to(torch::kDouble).detach().requires_grad_(),
                                        zeros({4})}));
}

TEST(MakeOptimizer, DecaysMatricesOnlyUnlessTold) {
  ReferencePair pair(Shapes{{8, 4}, {4}, {}});
  auto config = config_of("adamw");
  const auto optimizer = make_optimizer(config, named(pair.ours));
  ASSERT_EQ(optimizer->param_groups().size(), 2U);
  EXPECT_EQ(optimizer->param_groups()[0].params().size(), 1U);
  EXPECT_DOUBLE_EQ(
      static_cast<AdamWOptions&>(optimizer->param_groups()[0].options()).weight_decay(), 0.1);
  EXPECT_DOUBLE_EQ(
      static_cast<AdamWOptions&>(optimizer->param_groups()[1].options()).weight_decay(), 0.0);
  config.decay_biases_and_norms = true;
  EXPECT_EQ(make_optimizer(config, named(pair.ours))->param_groups().size(), 1U);
}

TEST(MakeOptimizer, TakesTiedWeightsOnceAndLeavesFrozenOnesOut) {
  ReferencePair pair(Shapes{{8, 4}, {8, 4}, {4, 4}});
  pair.ours[1].requires_grad_(false);
  auto parameters = named(pair.ours);
  parameters.emplace_back("head.weight", pair.ours[0]);
  const auto optimizer = make_optimizer(config_of("adafactor"), parameters);
  ASSERT_EQ(optimizer->param_groups().size(), 1U);
  EXPECT_EQ(optimizer->param_groups()[0].params().size(), 2U);
}

TEST(MakeOptimizer, KeepsFp32StateWhereAsked) {
  ReferencePair pair(Shapes{{100, 100}, {100, 100}});
  const auto is_embedding = [](const std::string& name, const at::Tensor& /*parameter*/) {
    return name == "p1";
  };
  const auto optimizer = make_optimizer(config_of("adamw_8bit"), named(pair.ours), is_embedding);
  optimizer->prepare_state();
  EXPECT_EQ(optimizer->state_bytes(),
            optimizer_state_bytes(config_of("adamw_8bit"), {{100, 100}}) + 80000);
}

TEST(MakeOptimizer, NamesTheChoicesOfAnUnknownName) {
  ReferencePair pair(Shapes{{4, 4}});
  for (const auto& run :
       {std::function<void()>([&] { make_optimizer(config_of("adamax"), named(pair.ours)); }),
        std::function<void()>([] { optimizer_state_bytes(config_of("adamax"), {}); })}) {
    try {
      run();
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("adafactor"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("did you mean 'adam'"), std::string::npos);
    }
  }
  EXPECT_THROW(make_optimizer(config_of("adamw"), {}), ConfigError);
}

TEST(OptimizerStateBytes, OfGpt2) {
  Shapes shapes = {{50257, 768}, {1024, 768}};
  for (int layer = 0; layer < 12; ++layer) {
    for (const auto& shape : Shapes{{768},
                                    {768},
                                    {2304, 768},
                                    {2304},
                                    {768, 768},
                                    {768},
                                    {768},
                                    {768},
                                    {3072, 768},
                                    {3072},
                                    {768, 3072},
                                    {768}}) {
      shapes.push_back(shape);
    }
  }
  shapes.insert(shapes.end(), {{768}, {768}});
  double num_parameters = 0;
  for (const auto& shape : shapes)
    num_parameters += static_cast<double>(shape.size() == 2 ? shape[0] * shape[1] : shape[0]);
  EXPECT_EQ(num_parameters, 124439808);
  const auto bytes_per_parameter = [&](const std::string& name) {
    return static_cast<double>(optimizer_state_bytes(config_of(name), shapes)) / num_parameters;
  };
  EXPECT_EQ(bytes_per_parameter("sgd"), 0);
  EXPECT_EQ(bytes_per_parameter("adamw"), 8);
  EXPECT_LT(bytes_per_parameter("adafactor"), 0.1);
  EXPECT_LE(bytes_per_parameter("adamw_8bit"), 2.1);
}

TEST(LeanerOptimizers, AreThoseWithLessStateAndTheNearestFirst) {
  const Shapes shapes = {{100, 100}, {7}};
  const std::set<std::string> known = {"sgd", "adam", "adamw", "adafactor", "adamw_8bit"};
  const auto names_for = [&](const OptimizerConfig& config) {
    std::vector<std::string> names;
    for (const LeanerOptimizer& leaner : leaner_optimizers(config, shapes)) {
      OptimizerConfig other = config;
      other.name = leaner.name;
      EXPECT_EQ(leaner.saved_bytes,
                optimizer_state_bytes(config, shapes) - optimizer_state_bytes(other, shapes));
      if (known.count(leaner.name) != 0) names.push_back(leaner.name);
    }
    return names;
  };
  EXPECT_EQ(names_for(config_of("adamw")),
            (std::vector<std::string>{"adamw_8bit", "adafactor", "sgd"}));
  EXPECT_EQ(names_for(config_of("sgd")), std::vector<std::string>());
  OptimizerConfig with_momentum = config_of("adamw");
  with_momentum.momentum = 0.9;
  EXPECT_EQ(names_for(with_momentum), (std::vector<std::string>{"sgd", "adamw_8bit", "adafactor"}));
}

}  // namespace
}  // namespace headroom
