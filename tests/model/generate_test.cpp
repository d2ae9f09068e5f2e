#include <headroom/model/generate.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>

#include "ops/cached_attention.h"
#include "ops/reference_ops.h"

#include "model/chain_runs.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using torch::Tensor;

struct Model {
  std::string name, config;
};
const std::vector<Model> kModels{
    {"gpt", "n_layer=2,n_head=2,n_embd=20,block_size=24,vocab_size=31"},
    {"llama",
     "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,hidden_size=24,"
     "intermediate_size=40,max_position_embeddings=24,vocab_size=31,attention_bias=true"}};

// Weights far larger than the initial ones, so that no two tokens are nearly as likely.
Chain make_decided(const Model& model) {
  torch::manual_seed(7);
  const Chain chain = make_model(model.name, model.config).chain;
  const torch::NoGradGuard no_grad;
  for (const Tensor& p : chain.parameters()) p.add_(torch::randn_like(p) * 0.5);
  return chain;
}

// Text as generate() promises it, by the stages of training: the loss of each candidate is smallest
// for the likeliest token.
std::vector<std::int64_t> likeliest_by_loss(const Chain& chain, std::vector<std::int64_t> tokens,
                                            std::int64_t num_tokens, std::int64_t num_positions,
                                            std::int64_t vocabulary) {
  const torch::NoGradGuard no_grad;
  const std::size_t start = tokens.size();
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    const auto count =
        std::min<std::int64_t>(num_positions, static_cast<std::int64_t>(tokens.size()));
    const Tensor text =
        torch::tensor(std::vector<std::int64_t>(tokens.end() - count, tokens.end()), torch::kLong)
            .unsqueeze(0);
    double least = HUGE_VAL;
    std::int64_t best = 0;
    for (std::int64_t candidate = 0; candidate < vocabulary; ++candidate) {
      Tensor targets = torch::full({1, count}, -100, torch::kLong);
      targets[0][count - 1] = candidate;
      const MicroBatch micro{{text}, {targets}, 1, 1};
      const double loss = testing::loss_of(chain, micro).item<double>();
      if (loss < least) {
        least = loss;
        best = candidate;
      }
    }
    tokens.push_back(best);
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(start), tokens.end()};
}

TEST(Generate, GivesTheLikeliestTokensWithAndWithoutACache) {
  for (const Model& model : kModels) {
    const Chain chain = make_decided(model);
    GenerateOptions options;
    options.temperature = 0.0;
    options.num_tokens = 30;  // beyond the positions of the model
    const std::vector<std::int64_t> prompt{3, 14, 15, 9, 2};
    const auto cached = generate(chain, prompt, options);
    EXPECT_EQ(cached, likeliest_by_loss(chain, prompt, 30, 24, 31)) << model.name;
    options.use_cache = false;
    EXPECT_EQ(cached, generate(chain, prompt, options)) << model.name;
    EXPECT_EQ(cached.size(), 30u);
  }
}

TEST(Generate, ContinuesFromOneTokenAndFromMoreThanTheModelCanSee) {
  for (const Model& model : kModels) {
    const Chain chain = make_decided(model);
    GenerateOptions options;
    options.temperature = 0.0;
    options.num_tokens = 4;
    for (const std::size_t size : {1u, 23u, 24u, 60u}) {
      std::vector<std::int64_t> prompt;
      for (std::size_t i = 0; i < size; ++i)
        prompt.push_back(static_cast<std::int64_t>(i * 7 % 31));
      EXPECT_EQ(generate(chain, prompt, options), likeliest_by_loss(chain, prompt, 4, 24, 31))
          << model.name << " from " << size;
    }
  }
}

TEST(Generate, DrawsBySeedAndStopsAtAToken) {
  for (const Model& model : kModels) {
    const Chain chain = make_decided(model);
    GenerateOptions options;
    options.num_tokens = 20;
    options.temperature = 5.0;
    options.top_k = 9;
    options.seed = 3;
    std::vector<std::int64_t> heard;
    options.on_token = [&](std::int64_t token) { heard.push_back(token); };
    torch::manual_seed(1);
    const auto first = generate(chain, {1}, options);
    const Tensor drawn = torch::rand({1});
    torch::manual_seed(1);
    EXPECT_TRUE(torch::equal(drawn, torch::rand({1}))) << "generate used LibTorch's random state";
    EXPECT_EQ(first, heard);
    EXPECT_EQ(first, generate(chain, {1}, options));
    options.stop_token = first[5];
    const auto stopped = generate(chain, {1}, options);
    EXPECT_LE(stopped.size(), 6u);
    EXPECT_EQ(stopped.back(), first[5]);
    options.stop_token.reset();
    options.seed = 4;
    EXPECT_NE(first, generate(chain, {1}, options));
    EXPECT_TRUE(chain.stage(0).module()->is_training());
  }
}

TEST(Generate, CacheTakesTheBytesThatItSays) {
  const Chain chain = make_decided(kModels[1]);
  MemoryMeter& meter = MemoryMeter::instance();
  const auto peak = [&](bool use_cache, std::int64_t num_tokens) {
    GenerateOptions options;
    options.num_tokens = num_tokens;
    options.use_cache = use_cache;
    const std::int64_t before = meter.live_bytes();
    meter.reset_peak();
    generate(chain, {1, 2}, options);
    EXPECT_EQ(meter.live_bytes(), before);
    return meter.peak_bytes() - before;
  };
  // Two blocks, keys and values of 2 heads of 6 channels each, for the prompt and 18 tokens.
  EXPECT_GE(peak(true, 18), 2 * 2 * 2 * 6 * 20 * 4);
}

TEST(Generate, RefusesWhatMakesNoSense) {
  const Chain chain = make_decided(kModels[0]);
  EXPECT_TRUE(can_generate(chain));
  EXPECT_FALSE(can_generate(Chain()));
  for (const char* name : {"mlp", "bert", "vit"}) {
    const Chain other = make_model(name, "").chain;
    EXPECT_FALSE(can_generate(other)) << name;
    EXPECT_THROW(generate(other, {1}), ConfigError) << name;
  }
  EXPECT_THROW(generate(chain, {}), ConfigError);
  EXPECT_THROW(generate(chain, {31}), DataError);
  for (const auto& break_it : std::vector<std::function<void(GenerateOptions&)>>{
           [](GenerateOptions& o) { o.num_tokens = -1; },
           [](GenerateOptions& o) { o.temperature = -0.5; },
           [](GenerateOptions& o) { o.temperature = std::nan(""); },
           [](GenerateOptions& o) { o.top_k = -1; }}) {
    GenerateOptions options;
    break_it(options);
    EXPECT_THROW(generate(chain, {1}, options), ConfigError);
  }
  EXPECT_TRUE(chain.stage(0).module()->is_training());
}

TEST(CachedAttention, IsAttentionPieceByPiece) {
  for (const bool rotary : {false, true}) {
    torch::manual_seed(1);
    AttentionOptions options;
    options.causal = true;
    options.num_kv_heads = 2;
    if (rotary) options.rotary = RotaryOptions();
    const Tensor qkv = torch::randn({1, 40, (6 + 4) * 8});
    const Tensor whole = attention(qkv, 6, options);
    for (const std::int64_t prompt : {1, 7, 40}) {
      KeyValueCache cache(2, 40, 8, qkv);
      std::vector<Tensor> parts{
          cached_attention(qkv.narrow(1, 0, prompt).contiguous(), 6, options, cache)};
      for (std::int64_t t = prompt; t < 40; ++t)
        parts.push_back(cached_attention(qkv.narrow(1, t, 1).contiguous(), 6, options, cache));
      EXPECT_EQ(cache.length, 40);
      EXPECT_LE(reference::difference(torch::cat(parts, 1), whole), 1e-5) << prompt;
      EXPECT_THROW(cached_attention(qkv.narrow(1, 0, 1).contiguous(), 6, options, cache),
                   c10::Error);
    }
  }
}

}  // namespace
}  // namespace headroom
