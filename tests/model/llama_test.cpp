#include "model/llama.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>

#include "model/chain_runs.h"
#include "model/published.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace headroom {
namespace {

using testing::expect_same_bits_for_every_option;
using testing::loss_of;
using testing::random_text;
using torch::Tensor;

const std::string kSmallLlama =
    "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,hidden_size=24,"
    "intermediate_size=40,max_position_embeddings=12,vocab_size=31";

TEST(LlamaConfig, HasThePublishedSizes) {
  EXPECT_EQ(num_parameters(llama_config("llama-3.2-1b")), 1235814400);
  EXPECT_EQ(num_parameters(llama_config("qwen2-0.5b")), 494032768);
  EXPECT_EQ(num_parameters(llama_config("tinyllama-1.1b")), 1100048384);
}

TEST(LlamaConfig, ReadsText) {
  const LlamaConfig config = llama_config(
      "qwen2-0.5b",
      "num_hidden_layers=3,rope_theta=1e4,rms_norm_eps=1e-4,tie_word_embeddings=false,length=77,"
      "head_dim=32,rope_factor=8,rope_original_max_position_embeddings=4096,"
      "attention_output_bias=true");
  EXPECT_EQ(config.num_hidden_layers, 3);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_DOUBLE_EQ(config.rope_theta, 1e4);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, 1e-4);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_TRUE(config.attention_bias);
  EXPECT_TRUE(config.attention_output_bias);
  EXPECT_EQ(sample_length(config), 77);
  EXPECT_EQ(head_size(config), 32);
  ASSERT_TRUE(config.rope_scaling.has_value());
  EXPECT_DOUBLE_EQ(config.rope_scaling->factor, 8.0);
  EXPECT_EQ(config.rope_scaling->original_length, 4096);
}

TEST(LlamaConfig, RefusesWhatDoesNotFit) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      llama_config("llama", text);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message("hidden_sizes=8").find("hidden_size"), std::string::npos);
  EXPECT_NE(message("num_key_value_heads=4").find("multiple"), std::string::npos);
  EXPECT_NE(message("hidden_size=100").find("102"), std::string::npos);
  EXPECT_NE(message("head_dim=7").find("even"), std::string::npos);
  EXPECT_NE(message("length=257").find("256"), std::string::npos);
  for (const char* text : {"rope_theta=0", "rope_theta=x", "rms_norm_eps=-1", "attention_bias=1",
                           "hidden_size=0", "rope_high_freq_factor=1", "head_dim=0"}) {
    EXPECT_NE(message(text), "no error") << text;
  }
  EXPECT_THROW(llama_config("llama-4"), ConfigError);
}

TEST(Llama, IsAChainOfNamedStages) {
  for (const char* more : {"", ",tie_word_embeddings=false,attention_bias=true",
                           ",head_dim=10,attention_output_bias=true"}) {
    const LlamaConfig config = llama_config("llama", kSmallLlama + more);
    const Chain chain = make_llama(config);
    ASSERT_EQ(chain.size(), 4u);
    EXPECT_EQ(chain.stage(0).name(), "embedding");
    EXPECT_EQ(chain.stage(2).name(), "block1");
    EXPECT_EQ(chain.stage(2).kind(), "llama_block");
    EXPECT_EQ(chain.stage(1).options().at(1), "no_product");
    EXPECT_EQ(chain.num_parameters(), num_parameters(config)) << more;
    EXPECT_TRUE(chain.runs_without_memory());
  }
}

TEST(Llama, HasHuggingFacesNames) {
  const Chain chain = make_llama(
      llama_config("llama", kSmallLlama + ",tie_word_embeddings=false,attention_bias=true"));
  std::vector<std::string> names;
  for (const auto& item : chain.named_parameters()) {
    for (const std::string& name : published_names(published_form(chain), item.first))
      names.push_back(name);
  }
  EXPECT_EQ(names.front(), "model.embed_tokens.weight");
  EXPECT_EQ(names.size(), 1u + 2u * 12u + 2u);
  for (const char* name :
       {"model.layers.1.self_attn.k_proj.bias", "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
}

TEST(Llama, StartsNearTheUniformLoss) {
  torch::manual_seed(1);
  const Chain chain = make_llama(llama_config("llama", kSmallLlama + ",vocab_size=200"));
  const MicroBatch micro = random_text(4, 12, 200);
  const torch::NoGradGuard no_grad;
  EXPECT_NEAR(loss_of(chain, micro).item<double>() / static_cast<double>(micro.num_items),
              std::log(200.0), 0.05);
}

TEST(Llama, GivesTheSameBitsForEveryOption) {
  for (const char* more : {"", ",attention_bias=true,tie_word_embeddings=false",
                           ",head_dim=10,attention_output_bias=true,rope_factor=4"}) {
    torch::manual_seed(2);
    const Chain chain = make_llama(llama_config("llama", kSmallLlama + more));
    expect_same_bits_for_every_option(chain, random_text(3, 11, 31));
  }
}

TEST(Llama, RefusesTokensAndLengthsThatDoNotFit) {
  const Chain chain = make_llama(llama_config("llama", kSmallLlama));
  MicroBatch micro = random_text(1, 6, 31);
  micro.inputs[0][0][0] = 31;
  EXPECT_THROW(loss_of(chain, micro), DataError);
  EXPECT_THROW(loss_of(chain, random_text(1, 13, 31)), ConfigError);
}

TEST(Llama, IsInTheZoo) {
  const ZooModel model = make_model("llama", kSmallLlama + ",length=9");
  EXPECT_EQ(model.input.kind, ModelInput::Kind::kTokens);
  EXPECT_EQ(model.input.length, 9);
  EXPECT_EQ(model.input.vocabulary, 31);
}

// What docs/kernels.md says, to the byte: C of the norm, (H + 2 K) D of queries, keys and values, H
// D of attention, C of the sum, C of the norm, 2 F of gate and up, F of their product, C of the
// output.
TEST(LlamaMemory, ABlockKeepsWhatTheTableSays) {
  constexpr std::int64_t kSamples = 2, kLength = 48, kHeads = 4, kWidth = 64, kKeys = 2 * 2 * 16,
                         kHidden = 96, kTokens = kSamples * kLength;
  const MemoryMeter& meter = MemoryMeter::instance();
  const Chain chain = make_llama(
      llama_config("llama",
                   "num_hidden_layers=1,num_attention_heads=4,num_key_value_heads=2,hidden_size=64,"
                   "intermediate_size=96,max_position_embeddings=48,vocab_size=100"));
  const Tensor x = torch::randn({kSamples, kLength, kWidth}).requires_grad_(true);
  const std::vector<std::int64_t> floats{
      6 * kWidth + kKeys + 3 * kHidden, 6 * kWidth + kKeys + 2 * kHidden,
      4 * kWidth + kKeys + 2 * kHidden, 3 * kWidth + 2 * kHidden, 3 * kWidth};
  for (std::size_t option = 0; option < floats.size(); ++option) {
    const std::int64_t before = meter.live_bytes();
    const Tensor y = chain.stage(1).forward({x}, {}, static_cast<int>(option)).at(0);
    // One deviation of each norm, and the maximum and sum of one softmax per head.
    EXPECT_EQ(meter.live_bytes() - before, kTokens * (floats[option] + 2 + 2 * kHeads) * 4)
        << chain.stage(1).options()[option];
  }
  const torch::NoGradGuard no_grad;
  const std::int64_t before = meter.live_bytes();
  const Tensor y = chain.stage(1).forward({x}, {}, 0).at(0);
  EXPECT_EQ(meter.live_bytes() - before, kTokens * kWidth * 4) << "without gradients";
}

}  // namespace
}  // namespace headroom
