#include <headroom/model/pretrained.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include <headroom/model/gpt.h>
#include <headroom/model/safetensors.h>
#include "model/published.h"

#include "support/flipped_bit.h"
#include "support/idx_files.h"
#include "support/scale.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using testing::read_file;
using testing::TemporaryFolder;
using testing::write_plain;
using TensorsByName = std::map<std::string, at::Tensor>;

const char* const kTinyGpt = "n_layer=2,n_head=2,n_embd=8,block_size=6,vocab_size=11";
const std::vector<std::pair<std::string, std::string>> kTinyModels = {
    {"gpt", kTinyGpt},
    {"gpt", "n_layer=1,n_head=2,n_embd=8,block_size=6,vocab_size=11,bias=false,gelu=exact"},
    {"bert",
     "hidden_size=8,num_hidden_layers=2,num_attention_heads=2,intermediate_size=12,"
     "max_position_embeddings=9,vocab_size=11,length=7,mask_token=3,mlm_probability=0.3"},
    {"vit",
     "hidden_size=8,num_hidden_layers=2,num_attention_heads=2,intermediate_size=12,"
     "patch_size=3,rows=6,columns=9,channels=2,classes=3,dropout=0.1"},
    {"clip",
     "vision_hidden_size=8,vision_num_hidden_layers=1,vision_num_attention_heads=2,"
     "text_hidden_size=4,text_num_hidden_layers=2,text_num_attention_heads=2,"
     "patch_size=4,rows=8,columns=8,vocab_size=11,length=5,projection_dim=6,gelu=quick"},
    {"llama",
     "hidden_size=8,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
     "intermediate_size=12,vocab_size=11,max_position_embeddings=9,length=7,rope_factor=4"},
    {"llama",
     "hidden_size=8,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=1,"
     "intermediate_size=12,vocab_size=11,max_position_embeddings=9,attention_bias=true,"
     "tie_word_embeddings=false"},
    {"mlp", "hidden=8,layers=1,rows=4,columns=4"},
    {"nin", "width=3,rows=8,columns=8"},
    {"resnet", "blocks=1,width=3,rows=8,columns=8"},
};

void expect_same_tensors(const Chain& a, const Chain& b) {
  const auto first = a.named_tensors(), second = b.named_tensors();
  ASSERT_EQ(first.size(), second.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].first, second[i].first);
    EXPECT_TRUE(torch::equal(first[i].second, second[i].second)) << first[i].first;
  }
}

TEST(Pretrained, EveryModelComesBack) {
  for (const auto& [name, sizes] : kTinyModels) {
    SCOPED_TRACE(name);
    const TemporaryFolder folder, again;
    const ZooModel model = make_model(name, sizes);
    const SavedModel saved = save_pretrained(model.chain, folder.path().string());
    EXPECT_EQ(saved.file, "model.safetensors");
    EXPECT_EQ(saved.sha256.size(), 64U);
    const ZooModel loaded = load_pretrained(folder.path().string());
    expect_same_tensors(model.chain, loaded.chain);
    EXPECT_EQ(static_cast<int>(loaded.input.kind), static_cast<int>(model.input.kind));
    EXPECT_EQ(loaded.input.rows, model.input.rows);
    EXPECT_EQ(loaded.input.columns, model.input.columns);
    EXPECT_EQ(loaded.input.num_classes, model.input.num_classes);
    EXPECT_EQ(loaded.input.length, model.input.length);
    EXPECT_EQ(loaded.input.num_masked, model.input.num_masked);
    EXPECT_EQ(loaded.input.mask_token, model.input.mask_token);
    EXPECT_EQ(save_pretrained(loaded.chain, again.path().string()).sha256, saved.sha256);
    EXPECT_EQ(read_file(again / "config.json"), read_file(folder / "config.json"));
    const std::int64_t num_parameters =
        make_model_of(folder.path().string()).chain.num_parameters();
    EXPECT_EQ(num_parameters, model.chain.num_parameters());
  }
}

TEST(Pretrained, ShapesAreTheirs) {
  const TemporaryFolder folder;
  const ZooModel gpt = make_model("gpt", kTinyGpt);
  save_pretrained(gpt.chain, folder.path().string());
  const TensorsByName tensors = load_safetensors(folder.path().string());
  const std::string name = "transformer.h.1.attn.c_attn.weight";
  EXPECT_EQ(tensors.at(name).sizes(), at::IntArrayRef({8, 24})) << "Conv1D: (in, out)";
  EXPECT_EQ(tensors.count("lm_head.weight"), 0U) << "a tied tensor is there once";
  for (const auto& [ours, tensor] : gpt.chain.named_parameters()) {
    if (ours != "block1.attn.c_attn.weight") continue;
    EXPECT_TRUE(torch::equal(tensor.t(), tensors.at(name)));
  }
}

/// A folder with a model whose tensors a test changes.
class Folder : public ::testing::Test {
 protected:
  void make(const std::string& name, const std::string& sizes) {
    model_ = make_model(name, sizes);
    save_pretrained(model_.chain, path());
    tensors_ = load_safetensors(path());
  }
  void change(const std::function<void(TensorsByName&)>& how) {
    TensorsByName changed = tensors_;
    how(changed);
    save_safetensors(folder_ / "model.safetensors", {changed.begin(), changed.end()});
  }
  void change_config(const std::string& key, const nlohmann::json& value) {
    nlohmann::json json = nlohmann::json::parse(read_file(folder_ / "config.json"));
    json[key] = value;
    write_plain(folder_ / "config.json", json.dump());
  }
  std::string refusal() const {
    try {
      load_pretrained(path());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  std::string path() const { return folder_.path().string(); }

  TemporaryFolder folder_;
  ZooModel model_;
  TensorsByName tensors_;
};

void rename(TensorsByName& tensors, const std::string& from, const std::string& to) {
  tensors[to] = tensors.at(from);
  tensors.erase(from);
}

TEST_F(Folder, NamesOfTheBareModelMasksAndTiesAreKnown) {
  make("gpt", kTinyGpt);
  change([](TensorsByName& tensors) {
    for (const auto& [name, tensor] : TensorsByName(tensors))
      rename(tensors, name, name.substr(12));
    tensors["h.0.attn.bias"] = torch::ones({1, 1, 6, 6});
    tensors["h.1.attn.masked_bias"] = torch::full({}, -1e4);
    tensors["lm_head.weight"] = tensors.at("wte.weight").clone();
  });
  expect_same_tensors(load_pretrained(path()).chain, model_.chain);
  change([](TensorsByName& tensors) {
    tensors["lm_head.weight"] = tensors.at("transformer.wte.weight").clone();
    tensors.at("lm_head.weight")[3][2] += 1;
  });
  EXPECT_NE(refusal().find("lm_head.weight"), std::string::npos) << refusal();
}

TEST_F(Folder, OldNamesOfNormsAndHeadsOfOtherTasksAreKnown) {
  make("bert", kTinyModels[2].second);
  change([](TensorsByName& tensors) {
    rename(tensors, "bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma");
    rename(tensors, "bert.embeddings.LayerNorm.bias", "bert.embeddings.LayerNorm.beta");
    tensors["bert.pooler.dense.weight"] = torch::ones({8, 8});
    tensors["cls.seq_relationship.bias"] = torch::ones({2});
    tensors["cls.predictions.decoder.bias"] = tensors.at("cls.predictions.bias").clone();
  });
  expect_same_tensors(load_pretrained(path()).chain, model_.chain);
}

TEST_F(Folder, AMissingHeadIsInitialised) {
  make("vit", kTinyModels[3].second);
  change([](TensorsByName& tensors) {
    tensors.erase("classifier.weight");
    tensors.erase("classifier.bias");
  });
  torch::manual_seed(1);
  ::testing::internal::CaptureStderr();
  const Chain chain = load_pretrained(path()).chain;
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("classifier.weight"), std::string::npos) << said;
  for (const auto& [name, tensor] : published_tensors(published_form(chain), chain)) {
    if (name == "classifier.weight") {
      EXPECT_GT(tensor.abs().max().item<float>(), 0.0F);
      EXPECT_LT(tensor.abs().max().item<float>(), 0.2F);
    } else if (name == "classifier.bias") {
      EXPECT_EQ(tensor.abs().max().item<float>(), 0.0F);
    } else {
      EXPECT_TRUE(torch::equal(tensor, tensors_.at(name))) << name;
    }
  }
}

TEST_F(Folder, WhatDoesNotFitIsNamed) {
  make("gpt", kTinyGpt);
  const std::string bias = "transformer.h.1.mlp.c_fc.bias";
  change([&](TensorsByName& tensors) { tensors.erase(bias); });
  EXPECT_NE(refusal().find("lacks " + bias), std::string::npos) << refusal();
  change([&](TensorsByName& tensors) { tensors["extra.weight"] = torch::ones({2}); });
  EXPECT_NE(refusal().find("extra.weight"), std::string::npos) << refusal();
  change([&](TensorsByName& tensors) { tensors[bias] = torch::ones({31}); });
  EXPECT_NE(refusal().find("(31)"), std::string::npos) << refusal();
  change([&](TensorsByName& tensors) { tensors[bias] = torch::ones({32}, at::kLong); });
  EXPECT_NE(refusal().find(bias), std::string::npos) << refusal();
  change([](TensorsByName&) {});
  EXPECT_EQ(refusal(), "");
}

TEST_F(Folder, AConfigThatCannotBeServedIsRefused) {
  make("gpt", kTinyGpt);
  const std::string good = read_file(folder_ / "config.json");
  const std::vector<std::pair<std::string, nlohmann::json>> bad = {{"model_type", "t5"},
                                                                   {"n_layer", -1},
                                                                   {"n_layer", "two"},
                                                                   {"n_layer", 2.5},
                                                                   {"n_layer", 1e30},
                                                                   {"n_head", 3},
                                                                   {"n_inner", 7},
                                                                   {"activation_function", "relu"},
                                                                   {"resid_pdrop", 1.0},
                                                                   {"attn_pdrop", 0.3},
                                                                   {"layer_norm_epsilon", 1e-3},
                                                                   {"scale_attn_weights", false},
                                                                   {"tie_word_embeddings", false},
                                                                   {"headroom", 3},
                                                                   {"vocab_size", 12}};
  for (const auto& [key, value] : bad) {
    change_config(key, value);
    EXPECT_NE(refusal(), "") << key << " " << value;
    write_plain(folder_ / "config.json", good);
  }
  EXPECT_EQ(refusal(), "");
  change_config("n_inner", nullptr);
  EXPECT_EQ(refusal(), "") << "null is absent";
  for (const char* text : {"", "[]", "{\"model_type\":", "nonsense"}) {
    write_plain(folder_ / "config.json", text);
    EXPECT_THROW(load_pretrained(path()), DataError) << text;
  }
  std::filesystem::remove(folder_ / "config.json");
  EXPECT_THROW(load_pretrained(path()), DataError);
  EXPECT_THROW(load_pretrained(folder_ / "absent"), DataError);
}

TEST_F(Folder, EveryFormOfRotaryScalingThatIsServed) {
  make("llama", kTinyModels[6].second);
  const std::string good = read_file(folder_ / "config.json");
  const auto saved_again = [&](const std::string& key, const nlohmann::json& value) {
    write_plain(folder_ / "config.json", good);
    change_config(key, value);
    const TemporaryFolder other;
    save_pretrained(load_pretrained(path()).chain, other.path().string());
    return nlohmann::json::parse(read_file(other / "config.json"));
  };
  for (const nlohmann::json& none :
       {nlohmann::json(), nlohmann::json{{"type", "default"}},
        nlohmann::json{{"rope_type", "default"}}, nlohmann::json::object()})
    EXPECT_EQ(saved_again("rope_scaling", none).at("rope_scaling"), none);
  const nlohmann::json scaling = {{"rope_type", "llama3"},
                                  {"factor", 32.0},
                                  {"low_freq_factor", 1.0},
                                  {"high_freq_factor", 4.0},
                                  {"original_max_position_embeddings", 8192}};
  EXPECT_EQ(saved_again("rope_scaling", scaling).at("rope_scaling"), scaling);
  nlohmann::json newer = scaling;
  newer["rope_theta"] = 500000.0;
  EXPECT_EQ(saved_again("rope_parameters", newer).at("rope_parameters"), newer);
  newer = {{"rope_type", "default"}, {"rope_theta", 5000.0}};
  EXPECT_EQ(saved_again("rope_parameters", newer).at("rope_parameters"), newer);
  change_config("rope_scaling", nullptr);
  change_config("rope_parameters", {{"rope_type", "yarn"}, {"factor", 4.0}});
  EXPECT_NE(refusal().find("'yarn'"), std::string::npos) << refusal();
}

TEST_F(Folder, KeysOfOthersAreKept) {
  make("vit", kTinyModels[3].second);
  change_config("id2label", {{"0", "cat"}, {"1", "dog"}, {"2", "bird"}});
  change_config("torch_dtype", "bfloat16");
  change_config("pad_token_id", 7);
  const TemporaryFolder other;
  save_pretrained(load_pretrained(path()).chain, other.path().string());
  const auto json = nlohmann::json::parse(read_file(other / "config.json"));
  EXPECT_EQ(json.at("id2label").at("1"), "dog");
  EXPECT_EQ(json.at("pad_token_id"), 7);
  EXPECT_EQ(json.at("torch_dtype"), "float32") << "that of the weights beside it";
  EXPECT_EQ(json.at("architectures").at(0), "ViTForImageClassification");
}

TEST(Pretrained, AChainOfOnesOwnComesBackByItsNames) {
  const TemporaryFolder folder;
  const auto make = [] {
    const torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    return Chain::from_sequential(net.ptr(), summed_cross_entropy);
  };
  const Chain chain = make(), other = make();
  chain.named_buffers().front().second.fill_(3.5);
  save_pretrained(chain, folder.path().string());
  load_weights(other, folder.path().string());
  expect_same_tensors(chain, other);
  EXPECT_THROW(load_pretrained(folder.path().string()), ConfigError);
  const torch::nn::Sequential wider(torch::nn::Linear(3, 5), torch::nn::BatchNorm1d(5));
  EXPECT_THROW(load_weights(Chain::from_sequential(wider.ptr(), summed_cross_entropy),
                            folder.path().string()),
               DataError);
}

// A flipped bit may leave the header's meaning as it is (in the text of __metadata__, say).
TEST_F(Folder, FlippedBitsInTheHeaderAreRefusedOrHarmless) {
  for (const std::size_t row : {0U, 2U, 6U}) {
    make(kTinyModels[row].first, kTinyModels[row].second);
    const std::string good = read_file(folder_ / "model.safetensors");
    const std::size_t header_bytes =
        8 + (static_cast<unsigned char>(good[0]) + 256U * static_cast<unsigned char>(good[1]));
    std::mt19937 random(static_cast<unsigned>(row));
    const int num_flips = testing::scaled(170);
    int num_refused = 0;
    for (int flip = 0; flip < num_flips; ++flip) {
      write_plain(folder_ / "model.safetensors",
                  testing::with_flipped_bit(good, random() % (8 * header_bytes)));
      try {
        expect_same_tensors(load_pretrained(path()).chain, model_.chain);
      } catch (const DataError&) {
        ++num_refused;
      }
    }
    EXPECT_GT(num_refused, num_flips * 3 / 4) << kTinyModels[row].first;
  }
}

TEST(Pretrained, AFolderThatCannotBeWrittenIsAnError) {
  const TemporaryFolder folder;
  write_plain(folder / "file", "");
  const ZooModel model = make_model("mlp", "hidden=8,layers=1,rows=4,columns=4");
  EXPECT_THROW(save_pretrained(model.chain, folder / "file"), ConfigError);
  EXPECT_THROW(save_pretrained(model.chain, folder / "file/below"), ConfigError);
}

TEST(Pretrained, LoadingAndSavingTakeTheWeightsAlone) {
  const TemporaryFolder folder;
  MemoryMeter& meter = MemoryMeter::instance();
  {
    const ZooModel model = make_model("gpt", "");
    const std::int64_t live = meter.live_bytes();
    meter.reset_peak();
    save_pretrained(model.chain, folder.path().string());
    EXPECT_EQ(meter.peak_bytes() - live, 0) << "no tensor is made, so that it fits any cap";
  }
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  const ZooModel model = load_pretrained(folder.path().string());
  const std::int64_t weights = 4 * model.chain.num_parameters();
  EXPECT_LT(meter.peak_bytes() - before, weights + weights / 100);
}

}  // namespace
}  // namespace headroom
