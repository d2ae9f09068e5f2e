#include <headroom/model/adapters.h>

#include <headroom/core/error.h>
#include <headroom/model/generate.h>
#include <headroom/model/safetensors.h>

#include "model/chain_runs.h"
#include "model/published.h"
#include "model/requested_model.h"
#include "support/idx_files.h"
#include "support/zoo_data.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <optional>
#include <set>

namespace headroom {
namespace {

using testing::expect_same_bits_for_every_option;
using testing::loss_of;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_plain;

struct Transformer {
  const char* model;
  const char* sizes;
  std::size_t usual;  // adapters by default
  std::size_t all;    // with all-linear
};

const Transformer kTransformers[] = {
    {"gpt", "n_layer=2,n_head=2,n_embd=16,block_size=12,vocab_size=31", 2, 8},
    {"llama",
     "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,hidden_size=16,"
     "intermediate_size=24,max_position_embeddings=12,vocab_size=31",
     4, 14},
    {"bert",
     "num_hidden_layers=2,num_attention_heads=2,hidden_size=16,intermediate_size=24,"
     "max_position_embeddings=16,length=12,vocab_size=31",
     4, 12},
    {"vit",
     "num_hidden_layers=2,num_attention_heads=2,hidden_size=16,intermediate_size=24,image_size=8,"
     "patch_size=4",
     4, 12},
    {"clip",
     "vision_num_hidden_layers=1,vision_num_attention_heads=2,vision_hidden_size=16,"
     "vision_intermediate_size=24,text_num_hidden_layers=1,text_num_attention_heads=2,"
     "text_hidden_size=16,text_intermediate_size=24,patch_size=4,image_size=8,vocab_size=31,"
     "length=8,projection_dim=12",
     4, 12}};

MicroBatch some_samples(const ZooModel& model) {
  return testing::synthetic_data(model.input, 3, 3)->load({0, 1, 2});
}

void disturb(const Chain& chain) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& p : chain.parameters()) p.add_(torch::randn_like(p) * 0.1);
}

class Adapters : public ::testing::TestWithParam<Transformer> {};

TEST_P(Adapters, StartAsTheModelAndTrainNothingElse) {
  torch::manual_seed(2);
  ZooModel model = make_model(GetParam().model, GetParam().sizes);
  model.chain.train(false);
  const MicroBatch micro = some_samples(model);
  const at::Tensor before = loss_of(model.chain, micro);
  add_adapters(model.chain, {});
  EXPECT_EQ(model.chain.parameters().size(), 2 * GetParam().usual);
  EXPECT_TRUE(loss_of(model.chain, micro).equal(before)) << "what an adapter adds is 0 at first";
  for (const auto& [name, parameter] : model.chain.named_parameters())
    EXPECT_NE(name.find(".lora."), std::string::npos) << name;
  EXPECT_THROW(add_adapters(model.chain, {}), ConfigError) << "twice";
}

TEST_P(Adapters, GiveTheSameBitsForEveryOptionWithDropout) {
  torch::manual_seed(4);
  ZooModel model = make_model(GetParam().model, GetParam().sizes);
  add_adapters(model.chain, {3, 6.0, 0.3, {"all-linear"}});
  EXPECT_EQ(model.chain.parameters().size(), 2 * GetParam().all);
  disturb(model.chain);
  expect_same_bits_for_every_option(model.chain, some_samples(model));
}

TEST_P(Adapters, MergedIntoTheirLayersAreTheSameModelToRounding) {
  torch::manual_seed(5);
  ZooModel model = make_model(GetParam().model, GetParam().sizes);
  const std::size_t num_weights = model.chain.parameters().size();
  model.chain.train(false);
  const MicroBatch micro = some_samples(model);
  add_adapters(model.chain, {3, 6.0, 0.3, {"all-linear"}});
  disturb(model.chain);
  const double adapted = loss_of(model.chain, micro).item<double>();
  merge_adapters(model.chain);
  EXPECT_NEAR(loss_of(model.chain, micro).item<double>(), adapted, 1e-4 * std::abs(adapted));
  EXPECT_EQ(model.chain.parameters().size(), num_weights) << "and is trained as a whole again";
}

TEST_P(Adapters, AreSavedInPeftsLayoutAndLoadedWithTheirBase) {
  torch::manual_seed(6);
  const TemporaryFolder folder;
  ZooModel model = make_model(GetParam().model, GetParam().sizes);
  add_adapters(model.chain, {2, 6.0, 0.1, {}});
  disturb(model.chain);
  EXPECT_EQ(save_pretrained(model.chain, folder.path().string()).file, "adapter_model.safetensors");
  EXPECT_FALSE(std::filesystem::exists(folder / "config.json"));
  const auto config = nlohmann::json::parse(read_file(folder / "adapter_config.json"));
  EXPECT_EQ(config.at("peft_type"), "LORA");
  EXPECT_EQ(config.at("r"), 2);
  EXPECT_EQ(config.at("lora_alpha"), 6.0);
  EXPECT_EQ(config.at("bias"), "none");
  EXPECT_EQ(config.at("fan_in_fan_out"), std::string(GetParam().model) == "gpt");
  EXPECT_EQ(config.at("base_model_name_or_path"), folder / "base_model") << "it had no folder";
  std::set<std::string> ends;
  for (const auto& [name, tensor] : load_safetensors(folder / "adapter_model.safetensors")) {
    EXPECT_EQ(name.rfind("base_model.model.", 0), 0u) << name;
    ends.insert(name.substr(name.rfind(".lora_")));
    EXPECT_EQ(tensor.size(name.find("lora_A") != std::string::npos ? 0 : 1), 2) << name;
  }
  EXPECT_EQ(ends, (std::set<std::string>{".lora_A.weight", ".lora_B.weight"}));

  const MicroBatch micro = some_samples(model);
  model.chain.train(false);
  const ZooModel loaded = load_pretrained(folder.path().string());
  loaded.chain.train(false);
  const double expected = loss_of(model.chain, micro).item<double>();
  EXPECT_NEAR(loss_of(loaded.chain, micro).item<double>(), expected, 1e-4 * std::abs(expected));
}

INSTANTIATE_TEST_SUITE_P(Zoo, Adapters, ::testing::ValuesIn(kTransformers),
                         [](const auto& which) { return std::string(which.param.model); });

TEST(AdapterErrors, NameTheNearestLayer) {
  ZooModel model = make_model(kTransformers[0].model, kTransformers[0].sizes);
  const auto message = [&](LoraConfig config) -> std::string {
    try {
      add_adapters(model.chain, config);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message({8, 8.0, 0.0, {"c_atn"}}).find("did you mean 'c_attn'"), std::string::npos);
  EXPECT_NE(message({0, 8.0, 0.0, {}}).find("rank 0"), std::string::npos);
  EXPECT_EQ(model.chain.parameters().size(),
            make_model("gpt", kTransformers[0].sizes).chain.parameters().size())
      << "nothing is frozen by a call that fails";
  Chain perceptron = make_model("mlp", "").chain;
  EXPECT_THROW(add_adapters(perceptron, {}), ConfigError);
}

TEST(AdapterErrors, SayWhatIsWrongWithAFolder) {
  const TemporaryFolder folder;
  ZooModel model = make_model(kTransformers[0].model, kTransformers[0].sizes);
  add_adapters(model.chain, {});
  save_pretrained(model.chain, folder.path().string());
  const std::string path = folder / "adapter_config.json", config = read_file(path);
  const auto with = [&](const std::string& key, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(config);
    json[key] = value;
    write_plain(path, json.dump());
  };
  with("use_dora", true);
  EXPECT_THROW(load_pretrained(folder.path().string()), ConfigError);
  with("modules_to_save", {"lm_head"});
  EXPECT_THROW(load_pretrained(folder.path().string()), ConfigError);
  with("base_model_name_or_path", "/no/such/folder");
  EXPECT_THROW(load_pretrained(folder.path().string()), DataError);
  with("base_model_name_or_path", folder.path().string());
  EXPECT_THROW(load_pretrained(folder.path().string()), DataError) << "no base of itself";
  with("r", 4);
  EXPECT_THROW(load_pretrained(folder.path().string()), DataError) << "the file has other sizes";
  with("target_modules", {"c_attn", "c_fc"});
  EXPECT_THROW(load_pretrained(folder.path().string()), DataError) << "the file lacks some";
}

TEST(AdapterHeads, OfNewClassesAreTrainedAndSavedBesideTheAdapters) {
  torch::manual_seed(9);
  const TemporaryFolder folder;
  save_pretrained(make_model("vit", kTransformers[3].sizes).chain, folder / "base");
  TrainingArguments arguments;
  arguments.model_name_or_path = folder / "base";
  arguments.lora_r = 2;
  ZooModel model = load_requested_model(arguments, {ModelHead::Kind::kClassifier, 3});
  std::size_t num_adapters = 0;
  for (const auto& [name, parameter] : model.chain.named_parameters()) {
    const bool is_adapter = name.find(".lora.") != std::string::npos;
    num_adapters += is_adapter ? 1 : 0;
    EXPECT_TRUE(is_adapter || name.rfind("head.", 0) == 0) << name;
  }
  EXPECT_EQ(num_adapters, 2 * kTransformers[3].usual);
  EXPECT_GT(model.chain.parameters().size(), num_adapters);
  disturb(model.chain);
  const std::vector<std::string> labels{"boot", "coat", "shirt"};
  set_label_names(model.chain, labels, std::nullopt);
  save_pretrained(model.chain, folder / "adapted");
  std::filesystem::rename(folder / "adapted", folder / "moved");
  EXPECT_EQ(label_names_of(folder / "moved"), labels);
  const ZooModel loaded = load_pretrained(folder / "moved");
  EXPECT_EQ(loaded.input.num_classes, 3);
  const MicroBatch micro = some_samples(model);
  model.chain.train(false);
  loaded.chain.train(false);
  const double expected = loss_of(model.chain, micro).item<double>();
  EXPECT_NEAR(loss_of(loaded.chain, micro).item<double>(), expected, 1e-4 * std::abs(expected));
}

TEST(AdapterDecoding, GivesTheTokensOfTheMergedModel) {
  torch::manual_seed(7);
  ZooModel model = make_model(kTransformers[0].model, kTransformers[0].sizes);
  add_adapters(model.chain, {3, 30.0, 0.3, {"all-linear"}});
  disturb(model.chain);
  GenerateOptions options;
  options.num_tokens = 8;
  options.temperature = 0.0;
  const auto adapted = generate(model.chain, {1, 2, 3}, options);
  merge_adapters(model.chain);
  EXPECT_EQ(generate(model.chain, {1, 2, 3}, options), adapted);
}

TEST(Freeze, TakesNamesOfEitherSideAndOfModules) {
  const auto trained = [](const std::vector<std::string>& patterns) {
    const ZooModel model = make_model(kTransformers[0].model, kTransformers[0].sizes);
    freeze(model.chain, patterns);
    std::set<std::string> names;
    for (const auto& [name, parameter] : model.chain.named_parameters()) names.insert(name);
    return names;
  };
  const std::size_t all = make_model("gpt", kTransformers[0].sizes).chain.parameters().size();
  EXPECT_EQ(trained({"embedding"}).size(), all - 2);
  EXPECT_EQ(trained({"transformer.h.0"}), trained({"block0"}));
  EXPECT_EQ(trained({"*ln_1*", "*ln_2*"}).size(), all - 8);
  EXPECT_THROW(trained({"block7"}), ConfigError);
  EXPECT_THROW(trained({"*"}), ConfigError) << "nothing is left";
}

}  // namespace
}  // namespace headroom
