// Low-rank adapters on the linear layers of TorchScript models.
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include <headroom/model/adapters.h>
#include <headroom/model/safetensors.h>
#include "model/script_folder.h"
#include "model/script_program.h"

#include "model/script_models.h"
#include "support/idx_files.h"

#include <torch/script.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <memory>
#include <set>

namespace headroom {
namespace {

using testing::read_file;
using testing::samples_for;
using testing::ScriptModels;
using testing::TemporaryFolder;
using testing::weigh_everything;
using testing::write_plain;

const char* const kAdaptable[] = {"adaptable", "adaptable_traced", "encoder", "encoder_traced"};

class ScriptAdapters : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { models_ = std::make_unique<ScriptModels>(); }
  static void TearDownTestSuite() { models_.reset(); }

  void SetUp() override { seed_everything(5); }

  static Chain open(const std::string& name, const MicroBatch& micro) {
    return Chain::from_script(models_->path(name), weigh_everything, micro);
  }

  static std::unique_ptr<ScriptModels> models_;
};

std::unique_ptr<ScriptModels> ScriptAdapters::models_;

std::set<std::string> names_of(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : tensors) names.insert(name);
  return names;
}

void disturb_adapters(const Chain& chain) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& p : chain.parameters()) p.add_(torch::randn_like(p) * 0.1);
}

double training_loss(const Chain& chain, const MicroBatch& micro) {
  seed_everything(8);
  const torch::NoGradGuard no_grad;
  return chain.whole()->loss(micro).item<double>();
}

// A trace draws random numbers in evaluation, too.
double evaluation_loss(const Chain& chain, const MicroBatch& micro) {
  seed_everything(8);
  chain.train(false);
  const double loss = Executor(chain).evaluate(micro)[0].item<double>();
  chain.train(true);
  return loss;
}

TEST_F(ScriptAdapters, AreOnEveryFormOfLinearLayer) {
  for (const char* name : {"adaptable", "adaptable_traced"}) {
    SCOPED_TRACE(name);
    const MicroBatch micro = samples_for(name, 4);
    Chain chain = open(name, micro);
    add_adapters(chain, {3, 6.0, 0.0, {}}, "", micro);
    std::set<std::string> expected;
    for (const char* layer : {"first", "conv", "shared", "body.0", "body.2", "head"}) {
      expected.insert(std::string(layer) + ".lora_A.weight");
      expected.insert(std::string(layer) + ".lora_B.weight");
    }
    EXPECT_EQ(names_of(chain.named_parameters()), expected) << "a matrix with other uses has none";
  }
  const MicroBatch micro = samples_for("encoder", 4);
  Chain chain = open("encoder", micro);
  add_adapters(chain, {2, 6.0, 0.0, {"in_proj_weight", "out_proj", "linear1"}}, "", micro);
  EXPECT_EQ(chain.parameters().size(), 12U);
}

TEST_F(ScriptAdapters, StartAsTheModel) {
  for (const char* name : kAdaptable) {
    SCOPED_TRACE(name);
    const MicroBatch micro = samples_for(name, 6);
    Chain chain = open(name, micro);
    const double trained = training_loss(chain, micro), evaluated = evaluation_loss(chain, micro);
    add_adapters(chain, {3, 6.0, 0.0, {}}, "", micro);
    EXPECT_NEAR(evaluation_loss(chain, micro), evaluated, 1e-4 * std::abs(evaluated));
    EXPECT_EQ(training_loss(chain, micro), trained) << "what an adapter adds is 0 at first";
    EXPECT_THROW(add_adapters(chain, {}), ConfigError) << "twice";
  }
}

TEST_F(ScriptAdapters, AreTheWholeGraphAtEveryLegalCut) {
  for (const char* name : kAdaptable) {
    SCOPED_TRACE(name);
    const MicroBatch micro = samples_for(name, 4);
    const Chain base = open(name, micro);
    std::vector<script::LayerAdapter> adapters;
    for (const at::Tensor& p : base.parameters()) p.requires_grad_(false);
    for (const script::LinearLayer& layer : script::linear_layers(base)) {
      adapters.push_back({layer, torch::randn({3, layer.in()}, torch::requires_grad()),
                          torch::randn({layer.out(), 3}, torch::requires_grad())});
    }
    const Chain chain = script::cut_with_adapters(base, adapters, {0.5, 0.3}, micro,
                                                  [](const script::CutGraph& graph, const auto&) {
                                                    std::vector<const script::Cut*> cuts;
                                                    for (const script::Cut& cut : graph.cuts)
                                                      cuts.push_back(&cut);
                                                    return cuts;
                                                  });
    EXPECT_GT(chain.size(), base.size());
    EXPECT_EQ(chain.parameters().size(), 2 * adapters.size());
    EXPECT_NO_THROW(check_whole_model(chain, micro)) << "with dropout, and every option";
  }
}

// By the chain rule, from the module itself with the adapters merged into its weights: with W + s B
// A in the place of W, the gradient of A is s B^T dW and that of B is s dW A^T.
TEST_F(ScriptAdapters, HaveTheGradientsOfTheMergedModule) {
  for (const char* name : kAdaptable) {
    SCOPED_TRACE(name);
    constexpr double kScale = 6.0 / 3;
    const MicroBatch micro = samples_for(name, 6);
    Chain chain = open(name, micro);
    const std::vector<script::LinearLayer> layers = script::linear_layers(chain);
    add_adapters(chain, {3, 6.0, 0.0, {}}, "", micro);
    disturb_adapters(chain);
    std::map<std::string, at::Tensor> adapters, gradients;
    seed_everything(8);
    chain.whole()->loss(micro).backward();
    for (const auto& [key, parameter] : chain.named_parameters()) {
      adapters[key] = parameter.detach().clone();
      gradients[key] = parameter.grad();
    }
    merge_adapters(chain);
    seed_everything(8);
    chain.whole()->loss(micro).backward();
    for (const script::LinearLayer& layer : layers) {
      const at::Tensor by_weight =
          layer.is_transposed ? layer.weight.grad().t() : layer.weight.grad();
      const std::string a = layer.name + ".lora_A.weight", b = layer.name + ".lora_B.weight";
      EXPECT_TRUE(
          torch::allclose(gradients.at(a), kScale * adapters.at(b).t().mm(by_weight), 1e-4, 1e-4))
          << a;
      EXPECT_TRUE(
          torch::allclose(gradients.at(b), kScale * by_weight.mm(adapters.at(a).t()), 1e-4, 1e-4))
          << b;
    }
  }
}

TEST_F(ScriptAdapters, MergedAreTheSameModelToRounding) {
  const TemporaryFolder folder;
  for (const char* name : kAdaptable) {
    SCOPED_TRACE(name);
    const MicroBatch micro = samples_for(name, 6);
    Chain chain = open(name, micro);
    const std::size_t num_weights = chain.parameters().size(), num_stages = chain.size();
    const double before = evaluation_loss(chain, micro);
    add_adapters(chain, {3, 6.0, 0.3, {}}, "", micro);
    disturb_adapters(chain);
    const double adapted = evaluation_loss(chain, micro);
    EXPECT_GT(std::abs(adapted - before), 1e-3 * std::abs(before));
    merge_adapters(chain);
    EXPECT_NEAR(evaluation_loss(chain, micro), adapted, 1e-4 * std::abs(adapted));
    EXPECT_EQ(chain.parameters().size(), num_weights) << "and is trained as a whole again";
    EXPECT_EQ(chain.size(), num_stages);
    EXPECT_NO_THROW(check_whole_model(chain, micro));
    chain.whole()->save(folder / "merged.pt");
    const Chain saved = Chain::from_script(folder / "merged.pt", weigh_everything, micro);
    EXPECT_EQ(evaluation_loss(saved, micro), evaluation_loss(chain, micro));
  }
}

TEST_F(ScriptAdapters, AreSavedInPeftsLayoutAndLoadedWithTheirBase) {
  const TemporaryFolder folder;
  const MicroBatch micro = samples_for("adaptable", 6);
  ScriptRequest request{models_->path("adaptable"), "cross_entropy"};
  Chain chain = load_script(request, micro);
  add_adapters(chain, {2, 6.0, 0.1, {"body.0", "conv"}}, "/of/no/use/with/buffers", micro);
  disturb_adapters(chain);
  EXPECT_EQ(save_pretrained(chain, folder / "run").file, "adapter_model.safetensors");
  const auto config = nlohmann::json::parse(read_file(folder / "run/adapter_config.json"));
  EXPECT_EQ(config.at("base_model_name_or_path"), folder / "run/base_model");
  EXPECT_EQ(config.at("target_modules"), nlohmann::json::parse(R"(["conv", "body.0"])"));
  const auto tensors = load_safetensors(folder / "run/adapter_model.safetensors");
  EXPECT_EQ(tensors.size(), 4U);
  EXPECT_EQ(tensors.at("base_model.model.conv.lora_A.weight").sizes(),
            (std::vector<int64_t>{2, 24}));
  EXPECT_EQ(tensors.at("base_model.model.conv.lora_B.weight").sizes(),
            (std::vector<int64_t>{16, 2}));

  std::filesystem::rename(folder / "run", folder / "moved");
  TrainingArguments arguments;
  arguments.model_name_or_path = folder / "moved";
  const std::optional<ScriptRequest> found = requested_script(arguments);
  ASSERT_TRUE(found);
  const Chain loaded = load_script(*found, micro);
  const double expected = evaluation_loss(chain, micro);
  EXPECT_NEAR(evaluation_loss(loaded, micro), expected, 1e-4 * std::abs(expected));
  EXPECT_EQ(loaded.parameters().size(),
            Chain::from_script(request.path, LossKind::kCrossEntropy, micro).parameters().size())
      << "trained as a whole";

  const std::string path = folder / "moved/adapter_config.json", text = read_file(path);
  auto json = nlohmann::json::parse(text);
  json["r"] = 4;
  write_plain(path, json.dump());
  EXPECT_THROW(load_script(*found, micro), DataError) << "the file has another rank";
}

TEST_F(ScriptAdapters, SayWhichLayersCanHaveThem) {
  const MicroBatch micro = samples_for("adaptable", 4);
  const auto message = [&](const char* name, const LoraConfig& config) -> std::string {
    const MicroBatch samples = samples_for(name, 4);
    Chain chain = open(name, samples);
    const std::size_t num_weights = chain.parameters().size();
    try {
      add_adapters(chain, config, "", samples);
    } catch (const ConfigError& error) {
      EXPECT_EQ(chain.parameters().size(), num_weights) << "nothing is frozen by a call that fails";
      return error.what();
    }
    return "no error";
  };
  const std::string unknown = message("adaptable", {8, 8.0, 0.0, {"haed"}});
  EXPECT_NE(unknown.find("did you mean 'head'"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("all-linear, first, conv, shared, body.0, body.2, head"),
            std::string::npos)
      << unknown;
  EXPECT_NE(message("adaptable", {8, 8.0, 0.0, {"tied"}}).find("'tied'"), std::string::npos);
  EXPECT_NE(message("t5", {8, 8.0, 0.0, {"emb"}}).find("'emb'"), std::string::npos)
      << "tied to an embedding";
  EXPECT_NE(message("unet", {8, 8.0, 0.0, {}}).find("has none"), std::string::npos);
  EXPECT_NE(message("adaptable", {0, 8.0, 0.0, {}}).find("rank 0"), std::string::npos);
}

}  // namespace
}  // namespace headroom
