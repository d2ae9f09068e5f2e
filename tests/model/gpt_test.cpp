#include <headroom/model/generate.h>
#include <headroom/model/gpt.h>

#include <headroom/core/error.h>

#include "model/chain_runs.h"
#include "model/published.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using testing::expect_same_bits_for_every_option;
using testing::loss_of;
using testing::random_text;
using torch::Tensor;

const char* const kSmallGpt = "n_layer=2,n_head=2,n_embd=20,block_size=12,vocab_size=31";

TEST(GptConfig, HasThePublishedSizes) {
  EXPECT_EQ(num_parameters(gpt_config("gpt2")), 124439808);
  EXPECT_EQ(num_parameters(gpt_config("gpt2-medium")), 354823168);
  EXPECT_EQ(num_parameters(gpt_config("gpt2-large")), 774030080);
  EXPECT_EQ(num_parameters(gpt_config("gpt2-xl")), 1557611200);
}

TEST(GptConfig, ReadsText) {
  const GptConfig config =
      gpt_config("gpt2", "n_layer=3,dropout=0.1,bias=false,gelu=exact,vocab_size=100");
  EXPECT_EQ(config.n_layer, 3);
  EXPECT_EQ(config.n_head, 12);
  EXPECT_EQ(config.vocab_size, 100);
  EXPECT_DOUBLE_EQ(config.dropout, 0.1);
  EXPECT_FALSE(config.bias);
  EXPECT_EQ(config.gelu, GeluKind::kExact);
}

TEST(GptConfig, NamesTheNearestWord) {
  const auto message = [](const std::string& name, const std::string& text) -> std::string {
    try {
      gpt_config(name, text);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message("gpt", "n_layers=3").find("n_layer"), std::string::npos);
  EXPECT_NE(message("gpt2-midium", "").find("gpt2-medium"), std::string::npos);
  EXPECT_NE(message("gpt", "n_embd=100,n_head=3").find("102"), std::string::npos);
  for (const char* text : {"n_layer", "n_layer=0", "n_layer=two", "n_layer=-1", "dropout=1",
                           "dropout=x", "bias=1", "gelu=relu", ","}) {
    EXPECT_NE(message("gpt", text), "no error") << text;
  }
}

TEST(Gpt, IsAChainOfNamedStages) {
  const Chain chain = make_gpt(gpt_config("gpt", kSmallGpt));
  ASSERT_EQ(chain.size(), 4u);
  EXPECT_EQ(chain.stage(0).name(), "embedding");
  EXPECT_EQ(chain.stage(2).name(), "block1");
  EXPECT_EQ(chain.stage(2).kind(), "gpt_block");
  EXPECT_EQ(chain.stage(3).name(), "head");
  EXPECT_EQ(chain.stage(1).options().size(), 5u);
  EXPECT_EQ(chain.num_parameters(), num_parameters(gpt_config("gpt", kSmallGpt)));
  std::vector<std::string> names;
  for (const auto& item : chain.named_parameters())
    names.push_back(published_names(published_form(chain), item.first).at(0));
  EXPECT_EQ(names.front(), "transformer.wte.weight");
  EXPECT_EQ(names.back(), "transformer.ln_f.bias");
  EXPECT_NE(std::find(names.begin(), names.end(), "transformer.h.1.mlp.c_proj.bias"), names.end());
}

TEST(Gpt, StartsAsGpt2Does) {
  torch::manual_seed(1);
  const Chain chain =
      make_gpt(gpt_config("gpt", "n_layer=8,n_head=2,n_embd=64,block_size=32,vocab_size=200"));
  for (const auto& [name, p] : chain.named_parameters()) {
    const double expected =
        name.find("ln_") != std::string::npos || name.find("bias") != std::string::npos ? 0.0
        : name.find("c_proj") != std::string::npos                                      ? 0.02 / 4
                                                                                        : 0.02;
    EXPECT_NEAR(p.std().item<double>(), expected, expected * 0.08) << name;
  }
  const MicroBatch micro = random_text(4, 32, 200);
  const torch::NoGradGuard no_grad;
  EXPECT_NEAR(loss_of(chain, micro).item<double>() / static_cast<double>(micro.num_items),
              std::log(200.0), 0.05);
}

TEST(Gpt, GivesTheSameBitsForEveryOption) {
  for (const char* dropout : {",dropout=0", ",dropout=0.2"}) {
    torch::manual_seed(2);
    const Chain chain = make_gpt(gpt_config("gpt", std::string(kSmallGpt) + dropout));
    const MicroBatch micro = random_text(3, 11, 31);
    expect_same_bits_for_every_option(chain, micro);
  }
}

TEST(Gpt, CountsOnlyTargetsThatAreNotIgnored) {
  torch::manual_seed(4);
  const Chain chain = make_gpt(gpt_config("gpt", kSmallGpt));
  MicroBatch micro = random_text(2, 6, 31);
  const torch::NoGradGuard no_grad;
  const double all = loss_of(chain, micro).item<double>();
  MicroBatch first = micro, second = micro;
  first.targets = {micro.targets[0].clone()};
  second.targets = {micro.targets[0].clone()};
  first.targets[0].slice(1, 0, 3).fill_(kGptIgnoreIndex);
  second.targets[0].slice(1, 3).fill_(kGptIgnoreIndex);
  EXPECT_NEAR(loss_of(chain, first).item<double>() + loss_of(chain, second).item<double>(), all,
              1e-4);
}

TEST(Gpt, DropsOnlyWhileTraining) {
  const Chain chain = make_gpt(gpt_config("gpt", std::string(kSmallGpt) + ",dropout=0.5"));
  const MicroBatch micro = random_text(2, 6, 31);
  const torch::NoGradGuard no_grad;
  EXPECT_NE(loss_of(chain, micro).item<float>(), loss_of(chain, micro).item<float>());
  chain.train(false);
  EXPECT_EQ(loss_of(chain, micro).item<float>(), loss_of(chain, micro).item<float>());
}

TEST(Gpt, LearnsAPatternAndContinuesIt) {
  torch::manual_seed(5);
  const Chain chain =
      make_gpt(gpt_config("gpt", "n_layer=1,n_head=2,n_embd=32,block_size=16,vocab_size=8"));
  torch::optim::Adam optimizer(chain.parameters(), torch::optim::AdamOptions(1e-2));
  const Tensor text = (torch::arange(17 * 8) % 8).view({8, 17});
  const MicroBatch micro{
      {text.slice(1, 0, 16).contiguous()}, {text.slice(1, 1).contiguous()}, 8, 128};
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    (loss_of(chain, micro) / 128.0).backward();
    optimizer.step();
  }
  GenerateOptions options;
  options.num_tokens = 20;
  options.temperature = 0.0;
  const std::vector<std::int64_t> continuation = generate(chain, {3, 4, 5}, options);
  ASSERT_EQ(continuation.size(), 20u);
  for (std::size_t i = 0; i < continuation.size(); ++i)
    EXPECT_EQ(continuation[i], static_cast<std::int64_t>((6 + i) % 8));
}

TEST(Gpt, GeneratesTheSameForTheSameSeedAndLeavesNoTrace) {
  const Chain chain = make_gpt(gpt_config("gpt", kSmallGpt));
  GenerateOptions options;
  options.num_tokens = 30;  // beyond block_size
  options.top_k = 5;
  options.seed = 3;
  torch::manual_seed(1);
  const auto first = generate(chain, {1}, options);
  const Tensor drawn = torch::rand({1});
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(drawn, torch::rand({1})));
  EXPECT_EQ(first, generate(chain, {1}, options));
  options.seed = 4;
  EXPECT_NE(first, generate(chain, {1}, options));
  EXPECT_TRUE(chain.stage(0).module()->is_training());
  EXPECT_THROW(generate(Chain(), {1}), ConfigError);
  EXPECT_THROW(generate(chain, {}), ConfigError);
}

TEST(Gpt, RefusesTokensAndLengthsThatDoNotFit) {
  const Chain chain = make_gpt(gpt_config("gpt", kSmallGpt));
  MicroBatch micro = random_text(1, 6, 31);
  micro.inputs[0][0][0] = 31;
  EXPECT_THROW(loss_of(chain, micro), DataError);
  EXPECT_THROW(loss_of(chain, random_text(1, 13, 31)), ConfigError);
}

}  // namespace
}  // namespace headroom
