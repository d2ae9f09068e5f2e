#include "model/bert.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include "ops/direct_gradient.h"

#include "model/chain_runs.h"
#include "model/published.h"
#include "ops/reference_ops.h"
#include "support/message_of.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

namespace headroom {
namespace {

using testing::expect_same_bits_for_every_option;
using testing::loss_of;
using testing::message_of;
using testing::take_gradients;
using torch::Tensor;

const char* const kSmallBert =
    "num_hidden_layers=2,num_attention_heads=2,hidden_size=20,intermediate_size=36,max_position_"
    "embeddings=14,length=12,vocab_size=31,"
    "mlm_probability=0.3";

MicroBatch masked_samples(const BertConfig& config, std::int64_t count) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i);
  const Masking masking{num_masked(config), config.mask_token, 5};
  return make_synthetic_tokens(count, config.length, config.vocab_size, 5, masking)->load(indices);
}

std::string bert_message(const std::string& name, const std::string& text) {
  return message_of<ConfigError>([&] { bert_config(name, text); });
}

TEST(BertConfig, HasThePublishedSizes) {
  EXPECT_EQ(num_parameters(bert_config("bert-base")), 109514298);
  EXPECT_EQ(num_parameters(bert_config("bert-large")), 335174458);
  EXPECT_DOUBLE_EQ(bert_config("bert-base").hidden_dropout_prob, 0.1);
  EXPECT_EQ(bert_config("bert-large").mask_token, 103);
  EXPECT_EQ(num_masked(bert_config("bert-base")), 77);
}

TEST(BertConfig, SettlesWhatIsLeftOpen) {
  const BertConfig bytes = bert_config("bert");
  EXPECT_EQ(bytes.mask_token, 256);
  EXPECT_EQ(bytes.length, 256);
  const BertConfig other =
      bert_config("bert", "vocab_size=100,length=5,dropout=0.2,mlm_probability=0.01");
  EXPECT_EQ(other.mask_token, 99);
  EXPECT_EQ(num_masked(other), 1) << "no sample is without an item";
  EXPECT_DOUBLE_EQ(other.attention_probs_dropout_prob, 0.2);
}

TEST(BertConfig, NamesTheNearestWord) {
  EXPECT_NE(bert_message("bert", "vocabsize=8").find("vocab_size"), std::string::npos);
  EXPECT_NE(bert_message("bert-bas", "").find("bert-base"), std::string::npos);
  EXPECT_NE(bert_message("bert", "hidden_size=100,num_attention_heads=3").find("102"),
            std::string::npos);
  EXPECT_NE(bert_message("bert", "length=257").find("max_position_embeddings"), std::string::npos);
  EXPECT_NE(bert_message("bert-base", "vocab_size=100").find("mask_token"), std::string::npos);
}

TEST(Bert, IsAChainOfNamedStages) {
  const Chain chain = make_bert(bert_config("bert", kSmallBert));
  ASSERT_EQ(chain.size(), 4u);
  EXPECT_EQ(chain.stage(0).name(), "embedding");
  EXPECT_EQ(chain.stage(2).kind(), "bert_block");
  EXPECT_EQ(chain.stage(3).name(), "head");
  EXPECT_TRUE(chain.runs_without_memory());
  EXPECT_EQ(chain.num_parameters(), num_parameters(bert_config("bert", kSmallBert)));
}

TEST(Bert, HasHuggingFacesNames) {
  const Chain chain = make_bert(bert_config("bert", kSmallBert));
  std::set<std::string> names;
  for (const auto& item : chain.named_parameters()) {
    for (const std::string& name : published_names(published_form(chain), item.first))
      EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(names.size(), 5u + 2 * 16u + 5u);
  for (const char* name : {"bert.embeddings.token_type_embeddings.weight",
                           "bert.encoder.layer.1.attention.self.value.weight",
                           "bert.encoder.layer.0.attention.output.LayerNorm.bias",
                           "bert.encoder.layer.1.intermediate.dense.bias", "cls.predictions.bias",
                           "cls.predictions.transform.LayerNorm.weight"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST(Bert, GivesTheSameBitsForEveryOption) {
  for (const char* dropout : {",dropout=0", ",dropout=0.2"}) {
    torch::manual_seed(2);
    const BertConfig config = bert_config("bert", std::string(kSmallBert) + dropout);
    const Chain chain = make_bert(config);
    const MicroBatch micro = masked_samples(config, 3);
    expect_same_bits_for_every_option(chain, micro);
  }
}

// A block keeps to the byte what ops/transformer.h says.
TEST(Bert, ABlockKeepsWhatTheTableSays) {
  constexpr std::int64_t kSamples = 2, kLength = 48, kHeads = 4, kWidth = 64;
  const MemoryMeter& meter = MemoryMeter::instance();
  const Chain chain = make_bert(bert_config(
      "bert", "num_hidden_layers=1,num_attention_heads=4,hidden_size=64,intermediate_size=256"));
  const Tensor x = torch::randn({kSamples, kLength, kWidth}).requires_grad_(true);
  const std::vector<std::int64_t> widths{16, 12, 11, 8,
                                         4};  // floats per token, in units of the width
  for (std::size_t option = 0; option < widths.size(); ++option) {
    const std::int64_t before = meter.live_bytes();
    const Tensor y = chain.stage(1).forward({x}, {}, static_cast<int>(option)).at(0);
    const std::int64_t floats = widths[option] * kWidth + 4 + 2 * kHeads;
    EXPECT_EQ(meter.live_bytes() - before, kSamples * kLength * floats * 4)
        << chain.stage(1).options()[option];
  }
}

TEST(Bert, PaddingIsSeenByNoToken) {
  torch::manual_seed(4);
  const BertConfig config = bert_config("bert", kSmallBert);
  const Chain chain = make_bert(config);
  const Tensor tokens = torch::randint(0, 31, {2, 8}), targets = torch::randint(0, 31, {2, 2}),
               positions = torch::tensor({{0, 5}, {2, 3}});
  const MicroBatch plain{{tokens}, {targets, positions}, 2, 4};
  const Tensor mask = torch::ones({2, 12}, torch::kBool);
  mask.slice(1, 8).fill_(false);
  const torch::NoGradGuard no_grad;
  for (const std::int64_t filler : {0, 30}) {
    const MicroBatch padded{
        {torch::cat({tokens, torch::full({2, 4}, filler, torch::kLong)}, 1), mask},
        {targets, positions},
        2,
        4};
    EXPECT_NEAR(loss_of(chain, padded).item<double>(), loss_of(chain, plain).item<double>(), 1e-5);
  }
}

TEST(Bert, CountsOnlyTargetsThatAreNotIgnored) {
  const BertConfig config = bert_config("bert", kSmallBert);
  const Chain chain = make_bert(config);
  const MicroBatch micro = masked_samples(config, 2);
  const torch::NoGradGuard no_grad;
  MicroBatch first = micro, second = micro;
  first.targets[0] = micro.targets[0].clone();
  second.targets[0] = micro.targets[0].clone();
  first.targets[0].slice(1, 0, 2).fill_(-100);
  second.targets[0].slice(1, 2).fill_(-100);
  const double sum = loss_of(chain, first).item<double>() + loss_of(chain, second).item<double>();
  EXPECT_NEAR(sum, loss_of(chain, micro).item<double>(), 1e-4);
}

TEST(Bert, WritesGradientsDirectlyWhereAllowed) {
  const BertConfig config = bert_config("bert", kSmallBert);
  const Chain chain = make_bert(config);
  const MicroBatch micro = masked_samples(config, 3);
  const auto run = [&](bool direct) {
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      const Tensor loss = loss_of(chain, micro);
      std::optional<DirectGradientScope> scope;
      if (direct)
        scope.emplace(
            [](const Tensor& parameter) { return torch::full_like(parameter, std::nan("")); });
      loss.backward();
    }
    return take_gradients(chain);
  };
  const std::vector<Tensor> usual = run(false), direct = run(true);
  const auto names = chain.named_parameters();
  for (std::size_t i = 0; i < usual.size(); ++i)
    EXPECT_LE(reference::difference(direct[i], usual[i]), 1e-6) << names[i].first;
}

TEST(Bert, LearnsToFillGaps) {
  torch::manual_seed(5);
  const BertConfig config =
      bert_config("bert",
                  "num_hidden_layers=1,num_attention_heads=2,hidden_size=32,intermediate_size=64,"
                  "max_position_embeddings=6,vocab_size=6");
  const Chain chain = make_bert(config);
  torch::optim::Adam optimizer(chain.parameters(), torch::optim::AdamOptions(3e-3));
  // One token again and again: the others say what is missing.
  const auto draw = [&] {
    const Tensor text = torch::randint(0, 5, {64, 1}).expand({64, 6}),
                 positions = torch::randint(0, 6, {64, 1});
    return MicroBatch{
        {text.scatter(1, positions, 5)}, {text.gather(1, positions), positions}, 64, 64};
  };
  double loss = 0.0;
  for (int step = 0; step < 200; ++step) {
    optimizer.zero_grad();
    const Tensor mean = loss_of(chain, draw()) / 64.0;
    mean.backward();
    optimizer.step();
    loss = mean.item<double>();
  }
  EXPECT_LT(loss, 0.3) << "from " << std::log(6.0);
}

TEST(Bert, RefusesTokensAndLengthsThatDoNotFit) {
  const BertConfig config = bert_config("bert", kSmallBert);
  const Chain chain = make_bert(config);
  MicroBatch micro = masked_samples(config, 1);
  micro.targets[1] = micro.targets[1] + 12;
  EXPECT_THROW(loss_of(chain, micro), DataError);
  micro.inputs[0] = torch::zeros({1, 15}, torch::kLong);
  EXPECT_THROW(loss_of(chain, micro), ConfigError);
}

}  // namespace
}  // namespace headroom
