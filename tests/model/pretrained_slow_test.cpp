// Folders that Headroom writes, read by plain PyTorch with Hugging Face's names, and the other way
// round. The Python program reads and writes safetensors by the format's description alone.

#include <headroom/model/pretrained.h>
#include <headroom/model/safetensors.h>
#include "model/published.h"

#include "model/chain_runs.h"
#include "support/build_paths.h"
#include "support/idx_files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <map>
#include <string>

namespace headroom {
namespace {

using testing::TemporaryFolder;
using Tensors = std::map<std::string, at::Tensor>;

void run_python(const std::string& arguments) {
  const std::string command = fmt::format("/usr/bin/python3 {}/tests/model/hugging_face.py {}",
                                          HEADROOM_SOURCE_DIR, arguments);
  ASSERT_EQ(std::system(command.c_str()), 0)
      << "PyTorch is needed to compare with (Debian: python3-torch). The command was: " << command;
}

struct Family {
  const char* name;   // of theirs
  const char* model;  // of ours
  const char* sizes;
};
const Family kFamilies[] = {
    {"gpt2", "gpt2", "n_layer=3,n_head=4,n_embd=32,block_size=19,vocab_size=83"},
    {"llama", "llama",
     "hidden_size=48,num_hidden_layers=3,num_attention_heads=6,num_key_value_heads=2,"
     "intermediate_size=72,max_position_embeddings=19,vocab_size=83,tie_word_embeddings=false"},
    {"qwen2", "llama",
     "hidden_size=48,num_hidden_layers=2,num_attention_heads=6,num_key_value_heads=3,"
     "intermediate_size=72,max_position_embeddings=19,vocab_size=83,attention_bias=true"},
    {"bert", "bert-base",
     "hidden_size=32,num_hidden_layers=3,num_attention_heads=4,intermediate_size=72,"
     "max_position_embeddings=19,vocab_size=83,dropout=0,mask_token=5"},
    {"vit", "vit",
     "hidden_size=32,num_hidden_layers=3,num_attention_heads=4,intermediate_size=72,"
     "patch_size=3,rows=9,columns=12,channels=2,classes=7"},
    {"clip", "clip",
     "vision_hidden_size=32,vision_num_hidden_layers=2,vision_num_attention_heads=4,"
     "text_hidden_size=24,text_num_hidden_layers=3,text_num_attention_heads=2,patch_size=3,"
     "rows=9,columns=12,channels=2,vocab_size=83,length=11,projection_dim=20,gelu=quick"}};

class PretrainedParity : public ::testing::TestWithParam<Family> {};

MicroBatch micro_batch(const std::string& family, const Tensors& tensors,
                       const std::string& prefix = "") {
  const auto at = [&](const std::string& name) {
    const auto found = tensors.find(prefix + name);
    return found == tensors.end() ? at::Tensor() : found->second;
  };
  MicroBatch micro;
  if (family == "clip") {
    micro.inputs = {at("images"), at("tokens"), at("ends").unsqueeze(1)};
  } else {
    micro.inputs = {family == "vit" ? at("images") : at("tokens")};
  }
  for (const char* name : {"targets", "positions"}) {
    if (at(name).defined()) micro.targets.push_back(at(name));
  }
  micro.num_samples = micro.inputs[0].size(0);
  const bool reads_images = family == "vit" || family == "clip";
  micro.num_items =
      reads_images || micro.targets.empty() ? micro.num_samples : micro.targets[0].numel();
  return micro;
}

// What the model says before the loss: its stages but for the last, whose parameters are taken by
// their published names.
at::Tensor logits_of(const std::string& family, const Chain& chain, const MicroBatch& micro) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> x = micro.inputs;
  if (family == "clip") x.resize(1);
  for (std::size_t stage = 0; stage + 1 < chain.size(); ++stage)
    x = chain.stage(stage).forward(x, micro, 0);
  const auto list = published_tensors(published_form(chain), chain);
  const Tensors weights(list.begin(), list.end());
  const auto norm = [&](const at::Tensor& value, const std::string& name, double eps) {
    return at::layer_norm(value, {value.size(-1)}, weights.at(name + ".weight"),
                          weights.at(name + ".bias"), eps);
  };
  if (family == "gpt2") {
    return at::linear(norm(x[0], "transformer.ln_f", 1e-5), weights.at("transformer.wte.weight"));
  }
  if (family == "llama" || family == "qwen2") {
    const at::Tensor scale =
        (x[0].square().mean({-1}, /*keepdim=*/true) + 1e-5).rsqrt();  // of the config's default eps
    const bool is_tied = weights.count("lm_head.weight") == 0;
    return at::linear(x[0] * scale * weights.at("model.norm.weight"),
                      weights.at(is_tied ? "model.embed_tokens.weight" : "lm_head.weight"));
  }
  if (family == "bert") {
    const std::string head = "cls.predictions.";
    const at::Tensor hidden = at::gelu(at::linear(x[0], weights.at(head + "transform.dense.weight"),
                                                  weights.at(head + "transform.dense.bias")));
    return at::linear(norm(hidden, head + "transform.LayerNorm", 1e-12),
                      weights.at("bert.embeddings.word_embeddings.weight"),
                      weights.at(head + "bias"));
  }
  if (family == "vit") {
    return at::linear(norm(x[0].select(1, 0), "vit.layernorm", 1e-6),
                      weights.at("classifier.weight"), weights.at("classifier.bias"));
  }
  return at::mm(x[0], x[1].t()) * weights.at("logit_scale").exp();
}

TEST_P(PretrainedParity, PyTorchReadsWhatIsSaved) {
  const Family family = GetParam();
  torch::manual_seed(6);
  const TemporaryFolder folder;
  const ZooModel model = make_model(family.model, family.sizes);
  {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& p : model.chain.parameters()) p.add_(torch::randn_like(p) * 0.05);
  }
  model.chain.train(false);
  save_pretrained(model.chain, folder.path().string());
  run_python(fmt::format("logits {}", folder.path().string()));
  const Tensors expected = load_safetensors(folder / "expected.safetensors");
  const at::Tensor ours = logits_of(family.name, model.chain, micro_batch(family.name, expected));
  const at::Tensor& theirs = expected.at("logits");
  ASSERT_EQ(ours.sizes(), theirs.sizes());
  EXPECT_LE((ours - theirs).abs().max().item<double>(), 1e-5 * theirs.abs().max().item<double>());
}

TEST_P(PretrainedParity, AFolderOfPyTorchTrainsAlikeAndComesBack) {
  const Family family = GetParam();
  const TemporaryFolder folder;
  run_python(fmt::format("make {} {}", family.name, folder.path().string()));
  const Tensors expected = load_safetensors(folder / "expected.safetensors");
  const ZooModel model = load_pretrained(folder.path().string());
  save_pretrained(model.chain, folder / "back");
  run_python(fmt::format("equal {} start.", folder / "back"));

  const std::vector<at::Tensor> parameters = model.chain.parameters();
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  for (std::int64_t update = 0; update < 3; ++update) {
    optimizer.zero_grad();
    const MicroBatch micro = micro_batch(family.name, expected, fmt::format("{}.", update));
    const at::Tensor loss =
        testing::loss_of(model.chain, micro, 0) / static_cast<double>(micro.num_items);
    loss.backward();
    const double theirs = expected.at("losses")[update].item<double>();
    EXPECT_NEAR(loss.item<double>(), theirs, 1e-5 * theirs) << "update " << update;
    optimizer.step();
  }
  for (const auto& [name, tensor] : published_tensors(published_form(model.chain), model.chain)) {
    // The gradient of a key's bias is noise around 0, which AdamW makes whole steps of.
    const bool is_key_bias = name.find("key.bias") != std::string::npos ||
                             name.find("k_proj.bias") != std::string::npos ||
                             name.find("c_attn.bias") != std::string::npos;
    if (is_key_bias) continue;
    EXPECT_LE((tensor - expected.at("end." + name)).abs().max().item<double>(), 1e-4) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PretrainedParity, ::testing::ValuesIn(kFamilies),
                         [](const auto& family) { return std::string(family.param.name); });

}  // namespace
}  // namespace headroom
