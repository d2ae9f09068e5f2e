#include "model/vit.h"

#include <headroom/core/error.h>

#include "model/chain_runs.h"
#include "model/published.h"
#include "support/message_of.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

namespace headroom {
namespace {

using testing::expect_same_bits_for_every_option;
using testing::loss_of;
using testing::message_of;
using testing::run_chain;
using torch::Tensor;

const char* const kSmallVit =
    "num_hidden_layers=2,num_attention_heads=2,hidden_size=20,intermediate_size=36,patch_size=3,"
    "rows=6,columns=9,channels=2,classes=5";

MicroBatch random_images(std::int64_t count) {
  return {{torch::randn({count, 2, 6, 9})}, {torch::randint(0, 5, {count})}, count, count};
}

std::string vit_message(const std::string& name, const std::string& text) {
  return message_of<ConfigError>([&] { vit_config(name, text); });
}

TEST(VitConfig, HasThePublishedSizes) {
  EXPECT_EQ(num_parameters(vit_config("vit-b16")), 86567656);
  EXPECT_EQ(num_parameters(vit_config("vit-l16")), 304326632);
}

TEST(VitConfig, ReadsText) {
  const VitConfig config = vit_config(
      "vit-b16",
      "image_size=28,patch_size=4,channels=1,classes=10,dropout=0.2,hidden_dropout_prob=0.1");
  EXPECT_EQ(config.rows, 28);
  EXPECT_EQ(config.columns, 28);
  EXPECT_EQ(config.hidden_size, 768);
  EXPECT_DOUBLE_EQ(config.hidden_dropout_prob, 0.1);
  EXPECT_DOUBLE_EQ(config.attention_probs_dropout_prob, 0.2);
}

TEST(VitConfig, NamesTheNearestWord) {
  EXPECT_NE(vit_message("vit", "hidden_sise=8").find("hidden_size"), std::string::npos);
  EXPECT_NE(vit_message("vit-b6", "").find("vit-b16"), std::string::npos);
  EXPECT_NE(vit_message("vit", "hidden_size=100,num_attention_heads=3").find("102"),
            std::string::npos);
  EXPECT_NE(vit_message("vit", "patch_size=5").find("28 x 28"), std::string::npos);
  for (const char* text : {"classes", "classes=0", "rows=x", "dropout=1", ","})
    EXPECT_NE(vit_message("vit", text), "no error") << text;
}

TEST(Vit, IsAChainOfNamedStages) {
  const Chain chain = make_vit(vit_config("vit", kSmallVit));
  ASSERT_EQ(chain.size(), 4u);
  EXPECT_EQ(chain.stage(0).name(), "embedding");
  EXPECT_EQ(chain.stage(2).name(), "block1");
  EXPECT_EQ(chain.stage(2).kind(), "vit_block");
  EXPECT_EQ(chain.stage(3).name(), "head");
  EXPECT_EQ(chain.stage(1).options().size(), 5u);
  EXPECT_TRUE(chain.runs_without_memory());
  EXPECT_EQ(chain.num_parameters(), num_parameters(vit_config("vit", kSmallVit)));
}

TEST(Vit, HasHuggingFacesNames) {
  const Chain chain = make_vit(vit_config("vit", kSmallVit));
  std::set<std::string> names;
  for (const auto& item : chain.named_parameters()) {
    for (const std::string& name : published_names(published_form(chain), item.first))
      EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(names.size(), 4u + 2 * 16u + 4u);
  for (const char* name :
       {"vit.embeddings.cls_token", "vit.embeddings.patch_embeddings.projection.weight",
        "vit.encoder.layer.1.attention.attention.key.bias",
        "vit.encoder.layer.0.layernorm_after.weight", "vit.encoder.layer.1.output.dense.weight",
        "vit.layernorm.bias", "classifier.weight"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST(Vit, GivesTheSameBitsForEveryOption) {
  for (const char* dropout : {",dropout=0", ",dropout=0.2"}) {
    torch::manual_seed(2);
    const Chain chain = make_vit(vit_config("vit", std::string(kSmallVit) + dropout));
    const MicroBatch micro = random_images(3);
    expect_same_bits_for_every_option(chain, micro);
  }
}

TEST(Vit, CountsRightAnswersOutsideOfTraining) {
  const Chain chain = make_vit(vit_config("vit", kSmallVit));
  const MicroBatch micro = random_images(40);
  EXPECT_EQ(run_chain(chain, micro).size(), 1u);
  chain.train(false);
  const torch::NoGradGuard no_grad;
  std::int64_t right = 0;
  for (std::int64_t i = 0; i < 40; ++i) {
    MicroBatch one{
        {micro.inputs[0].slice(0, i, i + 1)}, {micro.targets[0].slice(0, i, i + 1)}, 1, 1};
    // Right when no other class has a smaller loss.
    const double loss = loss_of(chain, one).item<double>();
    bool is_best = true;
    for (std::int64_t other = 0; other < 5; ++other) {
      one.targets = {torch::tensor({other})};
      is_best = is_best && loss <= loss_of(chain, one).item<double>();
    }
    right += is_best ? 1 : 0;
  }
  EXPECT_EQ(run_chain(chain, micro).at(1).item<std::int64_t>(), right);
}

TEST(Vit, SeesWherePatchesAre) {
  torch::manual_seed(5);
  // The class is which of the six patches is bright.
  const Chain learner =
      make_vit(vit_config("vit", std::string(kSmallVit) + ",classes=6,channels=1"));
  torch::optim::Adam optimizer(learner.parameters(), torch::optim::AdamOptions(3e-3));
  const auto draw = [](std::int64_t count) {
    MicroBatch micro{
        {torch::randn({count, 1, 6, 9}) * 0.1}, {torch::arange(count) % 6}, count, count};
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t patch = i % 6;
      micro.inputs[0][i][0]
          .slice(0, patch / 3 * 3, patch / 3 * 3 + 3)
          .slice(1, patch % 3 * 3, patch % 3 * 3 + 3)
          .add_(1.0);
    }
    return micro;
  };
  for (int step = 0; step < 80; ++step) {
    optimizer.zero_grad();
    (loss_of(learner, draw(24)) / 24.0).backward();
    optimizer.step();
  }
  learner.train(false);
  EXPECT_GE(run_chain(learner, draw(60)).at(1).item<std::int64_t>(), 57);
}

TEST(Vit, RefusesImagesThatDoNotFit) {
  const Chain chain = make_vit(vit_config("vit", kSmallVit));
  MicroBatch micro = random_images(2);
  micro.inputs = {torch::randn({2, 2, 9, 6})};
  EXPECT_THROW(loss_of(chain, micro), DataError);
}

}  // namespace
}  // namespace headroom
