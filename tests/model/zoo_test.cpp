#include <headroom/model/zoo.h>

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include "model/family.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <set>
#include <string>
#include <tuple>

namespace headroom {
namespace {

TEST(Zoo, MlpIsTheOneOfTheGuide) {
  const ZooModel model = make_model("mlp", "");
  EXPECT_EQ(model.chain.num_parameters(), 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10);
  EXPECT_EQ(model.chain.size(), 3U);
  EXPECT_EQ(
      make_model("mlp", "hidden=10,layers=1,rows=4,columns=4,classes=3").chain.num_parameters(),
      16 * 10 + 10 + 10 * 3 + 3);
}

TEST(Zoo, TheSeedDecidesTheWeights) {
  const auto first_weight = [](std::uint64_t seed) {
    seed_everything(seed);
    return make_model("mlp", "hidden=8").chain.parameters()[0].detach().clone();
  };
  EXPECT_TRUE(torch::equal(first_weight(1), first_weight(1)));
  EXPECT_FALSE(torch::equal(first_weight(1), first_weight(2)));
}

TEST(Zoo, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(make_model("mpl", ""), ConfigError);
  for (const char* config : {"hiden=8", "hidden=x", "hidden", "hidden=", "=8", "hidden=-1",
                             "hidden=8,,layers=2", "hidden=0"}) {
    EXPECT_THROW(make_model("mlp", config), ConfigError) << config;
  }
}

TEST(Zoo, RefusesSizesThatNoMachineHasWithTheNumber) {
  for (const auto& [name, config, number] : {std::tuple{"gpt", "n_layer=100000", "100000"},
                                             {"resnet", "blocks=1000000", "1000000"},
                                             {"mlp", "hidden=1099511627776", "1099511627776"},
                                             {"mlp", "rows=1048576", "1048576"},
                                             {"vit", "image_size=100000000", "100000000"},
                                             {"bert", "hidden_size=2000000", "2000000"},
                                             {"clip", "text_num_hidden_layers=100000", "100000"}}) {
    try {
      make_model(name, config);
      ADD_FAILURE() << config << " was accepted";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(number), std::string::npos) << error.what();
    }
  }
}

TEST(Zoo, AFamilyNamesItsModelsAndKeys) {
  std::set<std::string> names;
  for (const ModelFamily& family : model_families()) {
    EXPECT_FALSE(family.help.empty());
    ASSERT_FALSE(family.names.empty());
    for (const std::string& name : family.names) {
      EXPECT_TRUE(names.insert(name).second) << name << " twice";
      EXPECT_EQ(family_of(name).names, family.names);
    }
    // Every key is one that the maker knows: it complains of the value, not of the key.
    for (const std::string& key : family.keys) {
      try {
        family.make(family.names.front(), key + "=?");
        ADD_FAILURE() << key << "=? was accepted";
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find(key + "='?'"), std::string::npos) << error.what();
      }
    }
  }
  EXPECT_EQ(names.size(), model_names().size());
}

TEST(Zoo, EveryImageModelTrains) {
  for (const ModelFamily& family : model_families()) {
    const std::string& name = family.names.front();
    seed_everything(4);
    const ZooModel model = make_model(name, "");
    if (model.input.kind != ModelInput::Kind::kImages) continue;
    MicroBatch micro = {{torch::rand({2, 1, 28, 28})}, {torch::tensor({1, 2}, torch::kLong)}, 2, 2};
    Executor executor(model.chain);
    const MicroResult result = executor.accumulate(micro, keep_everything(model.chain.size()), 0.5);
    EXPECT_NEAR(result.loss_sum / 2, std::log(10.0), 1.5) << name;
    for (const auto& [parameter_name, parameter] : model.chain.named_parameters()) {
      EXPECT_TRUE(parameter.grad().defined()) << name << " " << parameter_name;
    }
  }
}

}  // namespace
}  // namespace headroom
