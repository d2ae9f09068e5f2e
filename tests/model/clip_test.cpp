#include "model/clip.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/model/zoo.h>

#include "model/chain_runs.h"
#include "model/published.h"
#include "support/zoo_data.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

namespace headroom {
namespace {

using testing::expect_same_bits_for_every_option;
using testing::loss_of;
using testing::run_chain;
using torch::Tensor;

const char* const kSmallClip =
    "vision_num_hidden_layers=2,vision_num_attention_heads=2,vision_hidden_size=20,vision_"
    "intermediate_size=36,text_num_hidden_layers=1,"
    "text_num_attention_heads=2,text_hidden_size=16,text_intermediate_size=24,patch_size=3,rows=6,"
    "columns=9,channels=2,vocab_size=31,"
    "length=8,"
    "projection_dim=12";

MicroBatch some_pairs(std::int64_t count) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i);
  return testing::synthetic_data(make_model("clip", kSmallClip).input, count, 3)->load(indices);
}

TEST(ClipConfig, HasThePublishedSizes) {
  EXPECT_EQ(num_parameters(clip_config("clip-vit-b32")), 151277313);
}

TEST(ClipConfig, NamesTheNearestWord) {
  const auto message = [](const std::string& name, const std::string& text) -> std::string {
    try {
      clip_config(name, text);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message("clip", "vision_hiden_size=8").find("vision_hidden_size"), std::string::npos);
  EXPECT_NE(message("clip-vit-b16", "").find("clip-vit-b32"), std::string::npos);
  EXPECT_NE(message("clip", "patch_size=5").find("28 x 28"), std::string::npos);
  EXPECT_NE(message("clip", "text_hidden_size=100,text_num_attention_heads=3").find("102"),
            std::string::npos);
}

TEST(Clip, IsAChainThatCouplesItsSamples) {
  const Chain chain = make_clip(clip_config("clip", kSmallClip));
  ASSERT_EQ(chain.size(), 8u);
  EXPECT_EQ(chain.stage(1).name(), "vision_block0");
  EXPECT_EQ(chain.stage(5).name(), "text_block0");
  EXPECT_TRUE(chain.runs_without_memory());
  EXPECT_TRUE(chain.couples_samples());
  EXPECT_TRUE(compares_embeddings(chain));
  EXPECT_FALSE(make_model("vit", "").chain.couples_samples());
  EXPECT_EQ(chain.num_parameters(), num_parameters(clip_config("clip", kSmallClip)));
}

TEST(Clip, HasHuggingFacesNames) {
  const Chain chain = make_clip(clip_config("clip", kSmallClip));
  std::set<std::string> names;
  for (const auto& item : chain.named_parameters()) {
    for (const std::string& name : published_names(published_form(chain), item.first))
      EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(names.size(), 5u + 3 * 16u + 3u + 2u + 4u);
  for (const char* name :
       {"vision_model.embeddings.class_embedding", "vision_model.pre_layrnorm.bias",
        "vision_model.encoder.layers.1.self_attn.k_proj.weight",
        "vision_model.post_layernorm.weight", "text_model.embeddings.token_embedding.weight",
        "text_model.encoder.layers.0.mlp.fc2.bias", "text_model.final_layer_norm.weight",
        "visual_projection.weight", "text_projection.weight", "logit_scale"}) {
    EXPECT_EQ(names.count(name), 1u) << name;
  }
}

TEST(Clip, GivesTheSameBitsForEveryOption) {
  torch::manual_seed(2);
  const Chain chain = make_clip(
      clip_config("clip", std::string(kSmallClip) + ",vision_dropout=0.2,text_dropout=0.2"));
  const MicroBatch micro = some_pairs(4);
  expect_same_bits_for_every_option(chain, micro);
}

TEST(Clip, TheLossOfABatchIsNotThatOfItsParts) {
  torch::manual_seed(4);
  const Chain chain = make_clip(clip_config("clip", kSmallClip));
  const MicroBatch whole = some_pairs(4);
  const torch::NoGradGuard no_grad;
  double parts = 0.0;
  for (const std::int64_t begin : {0, 2}) {
    MicroBatch part{{}, {}, 2, 2};
    for (const Tensor& input : whole.inputs)
      part.inputs.push_back(input.slice(0, begin, begin + 2));
    parts += loss_of(chain, part).item<double>();
  }
  EXPECT_GT(loss_of(chain, whole).item<double>(), parts + 1.0) << "more to be told apart";
}

TEST(Clip, SeesNothingBehindTheEndOfAText) {
  const Chain chain = make_clip(clip_config("clip", kSmallClip));
  MicroBatch micro = some_pairs(3);
  micro.inputs[2] = torch::tensor({{2}, {3}, {7}});
  const torch::NoGradGuard no_grad;
  const float before = loss_of(chain, micro).item<float>();
  micro.inputs[1] = micro.inputs[1].clone();
  micro.inputs[1][0].slice(0, 3).fill_(5);
  EXPECT_EQ(loss_of(chain, micro).item<float>(), before);
  micro.inputs[1][0][1] = (micro.inputs[1][0][1] + 1) % 31;
  EXPECT_NE(loss_of(chain, micro).item<float>(), before);
}

TEST(Clip, LearnsWhichBelongTogether) {
  torch::manual_seed(5);
  const Chain chain = make_clip(clip_config("clip", kSmallClip));
  const MicroBatch micro = some_pairs(8);
  torch::optim::Adam optimizer(chain.parameters(), torch::optim::AdamOptions(3e-3));
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    (loss_of(chain, micro) / 8.0).backward();
    optimizer.step();
  }
  chain.train(false);
  EXPECT_EQ(run_chain(chain, micro).at(1).item<std::int64_t>(), 8);
}

}  // namespace
}  // namespace headroom
