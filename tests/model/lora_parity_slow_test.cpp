// Adapters against plain PyTorch from the same folder in PEFT's layout: losses, every gradient, and
// the adapters after some updates.
#include <headroom/model/adapters.h>
#include <headroom/model/safetensors.h>

#include "model/chain_runs.h"
#include "support/build_paths.h"
#include "support/idx_files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace headroom {
namespace {

using testing::TemporaryFolder;
using Tensors = std::map<std::string, at::Tensor>;

struct AdaptedFamily {
  const char* name;  // of theirs
  const char* model;
  const char* sizes;
  std::vector<std::string> targets;
};

const AdaptedFamily kAdaptedFamilies[] = {
    {"gpt2",
     "gpt2",
     "n_layer=3,n_head=4,n_embd=32,block_size=19,vocab_size=83,dropout=0",
     {"c_attn"}},
    {"gpt2_all",
     "gpt2",
     "n_layer=2,n_head=2,n_embd=24,block_size=9,vocab_size=83,dropout=0",
     {"c_attn", "c_proj", "c_fc"}},
    {"llama",
     "llama",
     "hidden_size=48,num_hidden_layers=2,num_attention_heads=6,num_key_value_heads=2,"
     "intermediate_size=72,max_position_embeddings=19,vocab_size=83,tie_word_embeddings=false",
     {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}},
    {"bert",
     "bert-base",
     "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=72,"
     "max_position_embeddings=19,vocab_size=83,dropout=0,mask_token=5",
     {"query", "value"}},
    {"vit",
     "vit",
     "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=72,"
     "patch_size=3,rows=9,columns=12,channels=2,classes=7",
     {"query", "value", "intermediate.dense"}},
    {"clip",
     "clip",
     "vision_hidden_size=32,vision_num_hidden_layers=2,vision_num_attention_heads=4,"
     "text_hidden_size=24,text_num_hidden_layers=2,text_num_attention_heads=2,patch_size=3,"
     "rows=9,columns=12,channels=2,vocab_size=83,length=11,projection_dim=20",
     {"q_proj", "v_proj", "fc2"}}};

MicroBatch adapter_batch(const Tensors& tensors, const std::string& prefix) {
  MicroBatch micro;
  for (const char* name : {"inputs", "images", "tokens", "ends"}) {
    const auto found = tensors.find(prefix + name);
    if (found == tensors.end()) continue;
    micro.inputs.push_back(std::string(name) == "ends" ? found->second.unsqueeze(1)
                                                       : found->second);
  }
  for (const char* name : {"targets", "positions"}) {
    const auto found = tensors.find(prefix + name);
    if (found != tensors.end()) micro.targets.push_back(found->second);
  }
  micro.num_samples = micro.inputs[0].size(0);
  micro.num_items = micro.targets.empty() ? micro.num_samples : micro.targets[0].numel();
  return micro;
}

// What the folder holds of the chain's adapters, by PEFT's names.
Tensors saved_adapters(const Chain& chain, const TemporaryFolder& folder, const char* name) {
  save_pretrained(chain, folder / name);
  return load_safetensors(folder / name + "/adapter_model.safetensors");
}

// Relative to the largest of a tensor. CLIP's temperature multiplies the rounding errors of its
// embeddings by 14, and the gradients of its towers are differences of large numbers.
double tolerance_of(const AdaptedFamily& family) {
  return std::string(family.name) == "clip" ? 5e-5 : 1e-5;
}

void expect_near(const at::Tensor& ours, const at::Tensor& theirs, double tolerance,
                 const std::string& name) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << name;
  EXPECT_LE((ours - theirs).abs().max().item<double>(),
            tolerance * theirs.abs().max().item<double>())
      << name;
}

// As make_optimizer() of lora.py.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const AdaptedFamily& family,
                                                        const std::vector<at::Tensor>& parameters) {
  if (std::string(family.name) == "clip") {
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0.01).eps(1e-6));
}

class LoraParity : public ::testing::TestWithParam<AdaptedFamily> {};

// Trains the adapters as the Python program did that wrote expected.safetensors.
void compare_updates(const Chain& chain, const TemporaryFolder& folder, double tolerance,
                     torch::optim::Optimizer& optimizer) {
  const Tensors expected = load_safetensors(folder / "expected.safetensors");
  const std::vector<at::Tensor> adapters = chain.parameters();
  for (std::int64_t update = 0; update < 3; ++update) {
    optimizer.zero_grad();
    const MicroBatch micro = adapter_batch(expected, fmt::format("{}.", update));
    const at::Tensor loss =
        testing::loss_of(chain, micro, 0) / static_cast<double>(micro.num_items);
    loss.backward();
    const double theirs = expected.at("losses")[update].item<double>();
    EXPECT_NEAR(loss.item<double>(), theirs, 1e-5 * theirs) << "update " << update;
    if (update == 0) {
      // The gradients in the places of the values, so that they are saved by PEFT's names.
      const torch::NoGradGuard no_grad;
      std::vector<at::Tensor> values;
      for (const at::Tensor& p : adapters) {
        values.push_back(p.clone());
        at::Tensor(p.detach()).copy_(p.grad());
      }
      for (const auto& [name, gradient] : saved_adapters(chain, folder, "gradients"))
        expect_near(gradient, expected.at("gradient." + name), tolerance, name);
      for (std::size_t i = 0; i < adapters.size(); ++i)
        at::Tensor(adapters[i].detach()).copy_(values[i]);
    }
    optimizer.step();
  }
  // AdamW divides a gradient by its own size: small ones, whose rounding errors are relatively
  // larger, move a weight as far as large ones do.
  constexpr double kOfUpdates = 5;
  for (const auto& [name, value] : saved_adapters(chain, folder, "end"))
    expect_near(value, expected.at("end." + name), kOfUpdates * tolerance, name);
}

void run_lora(const std::string& arguments) {
  const std::string command =
      fmt::format("/usr/bin/python3 {}/tests/model/{}", HEADROOM_SOURCE_DIR, arguments);
  ASSERT_EQ(std::system(command.c_str()), 0)
      << "PyTorch is needed to compare with (Debian: python3-torch). The command was: " << command;
}

// Larger than the initial values, so that every part matters to the loss.
void enlarge(const Chain& chain) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& p : chain.parameters()) p.add_(torch::randn_like(p) * 0.05);
}

TEST_P(LoraParity, TrainsAsPlainPyTorch) {
  const AdaptedFamily family = GetParam();
  const TemporaryFolder folder;
  torch::manual_seed(6);
  ZooModel model = make_model(family.model, family.sizes);
  enlarge(model.chain);
  save_pretrained(model.chain, folder / "base");
  add_adapters(model.chain, {8, 16.0, 0.0, family.targets}, folder / "base");
  enlarge(model.chain);
  save_pretrained(model.chain, folder.path().string());
  ASSERT_NO_FATAL_FAILURE(run_lora("lora.py " + folder.path().string()));
  compare_updates(model.chain, folder, tolerance_of(family),
                  *make_optimizer(family, model.chain.parameters()));
}

INSTANTIATE_TEST_SUITE_P(Families, LoraParity, ::testing::ValuesIn(kAdaptedFamilies),
                         [](const auto& family) { return std::string(family.param.name); });

// Layers of every form, and PyTorch's own encoder, whose matrix of queries, keys and values is no
// module of its own.
TEST(ScriptLoraParity, TrainsAsPlainPyTorch) {
  for (const AdaptedFamily& family :
       {AdaptedFamily{"adaptable", "", "", {}},
        AdaptedFamily{"encoder", "", "", {"embed", "linear1", "linear2", "head"}}}) {
    SCOPED_TRACE(family.name);
    const TemporaryFolder folder;
    const std::string where =
        fmt::format("script_lora.py {} {}", folder.path().string(), family.name);
    ASSERT_NO_FATAL_FAILURE(run_lora(where + " write"));
    torch::manual_seed(6);
    Chain chain =
        Chain::from_script(folder / (std::string(family.name) + ".pt"), LossKind::kCrossEntropy);
    add_adapters(chain, {8, 16.0, 0.0, family.targets});
    enlarge(chain);
    save_pretrained(chain, folder.path().string());
    ASSERT_NO_FATAL_FAILURE(run_lora(where));
    compare_updates(chain, folder, tolerance_of(family),
                    *make_optimizer(family, chain.parameters()));
  }
}

}  // namespace
}  // namespace headroom
