// Our GPT against the usual one in PyTorch, from the same weights and tokens: loss, every gradient, and twenty updates.

#include <headroom/model/gpt.h>

#include "ops/twins.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace headroom {
namespace {

using torch::Tensor;

constexpr std::int64_t kBatch = 3, kLength = 37, kUpdates = 20, kVocabulary = 211;

void write_bytes(const std::string& path, const std::vector<Tensor>& tensors) {
  std::ofstream file(path, std::ios::binary);
  for (const Tensor& tensor : tensors) {
    const Tensor plain = tensor.detach().contiguous();
    file.write(static_cast<const char*>(plain.data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
  }
}

// Floats of a file, cut into tensors of the sizes of `like`.
std::vector<Tensor> read_floats(const std::string& path, const std::vector<Tensor>& like) {
  std::ifstream file(path, std::ios::binary);
  std::vector<Tensor> tensors;
  for (const Tensor& tensor : like) {
    Tensor values = torch::empty(tensor.sizes());
    file.read(static_cast<char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
    EXPECT_TRUE(file.good()) << path << " is too short";
    tensors.push_back(values);
  }
  return tensors;
}

Tensor mean_loss(const Chain& chain, const Tensor& text) {
  const MicroBatch micro{{text.slice(1, 0, kLength).contiguous()}, {text.slice(1, 1).contiguous()}, kBatch, kBatch * kLength};
  std::vector<Tensor> values = micro.inputs;
  for (std::size_t i = 0; i < chain.size(); ++i) values = chain.stage(i).forward(values, micro, 0);
  return values.at(0) / static_cast<double>(kBatch * kLength);
}

// The gradient of the bias of the keys is 0 in exact arithmetic (it shifts all scores of a query alike). What is computed is noise, which
// AdamW scales up to whole steps: it says nothing.
Tensor without_key_bias(const std::string& name, const Tensor& tensor) {
  if (name.find("c_attn.bias") == std::string::npos) return tensor;
  const std::int64_t width = tensor.size(0) / 3;
  return torch::cat({tensor.slice(0, 0, width), tensor.slice(0, 2 * width)});
}

TEST(GptParity, EqualsPyTorch) {
  const std::string folder = (std::filesystem::temp_directory_path() / fmt::format("headroom-parity-{}", ::getpid())).string();
  std::filesystem::create_directories(folder);
  torch::manual_seed(11);
  const GptConfig config =
      gpt_config("gpt2", fmt::format("n_layer=3,n_head=4,n_embd=48,block_size={},vocab_size={}", kLength, kVocabulary));
  const Chain chain = make_gpt(config);
  {
    // Larger weights than GPT-2's initial ones, so that every part of the model matters to the loss.
    const torch::NoGradGuard no_grad;
    for (const Tensor& p : chain.parameters()) p.add_(torch::randn_like(p) * 0.05);
  }
  const Tensor text = torch::randint(0, kVocabulary, {kUpdates, kBatch, kLength + 1});
  const std::vector<Tensor> parameters = chain.parameters();
  std::vector<std::string> names;
  std::ofstream index(folder + "/index.txt");
  for (const auto& item : chain.named_parameters()) {
    names.push_back(gpt2_parameter_name(item.first));
    index << names.back() << '\n';
  }
  index.close();
  std::ofstream(folder + "/config.txt") << fmt::format("{} {} {} {} {} {} {}", config.n_layer, config.n_head, config.n_embd, kLength,
                                                       kVocabulary, kBatch, kUpdates);
  write_bytes(folder + "/weights.bin", parameters);
  write_bytes(folder + "/tokens.bin", {text});

  const std::string command = fmt::format("/usr/bin/python3 {}/benchmarks/gpt/pytorch_gpt.py parity {}", HEADROOM_SOURCE_DIR, folder);
  ASSERT_EQ(std::system(command.c_str()), 0) << "PyTorch is needed to compare with (Debian: python3-torch). The command was: " << command;
  std::vector<double> expected_losses;
  std::ifstream losses(folder + "/losses.txt");
  for (double loss = 0.0; losses >> loss;) expected_losses.push_back(loss);
  ASSERT_EQ(expected_losses.size(), static_cast<std::size_t>(kUpdates));
  const std::vector<Tensor> expected_gradients = read_floats(folder + "/gradients.bin", parameters);
  const std::vector<Tensor> expected_trained = read_floats(folder + "/trained.bin", parameters);

  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  for (std::int64_t update = 0; update < kUpdates; ++update) {
    optimizer.zero_grad();
    const Tensor loss = mean_loss(chain, text[update]);
    loss.backward();
    const double expected = expected_losses[static_cast<std::size_t>(update)];
    EXPECT_NEAR(loss.item<double>(), expected, (update == 0 ? 1e-5 : 1e-4) * expected) << "update " << update;
    for (std::size_t i = 0; update == 0 && i < parameters.size(); ++i) {
      const double scale = expected_gradients[i].abs().max().item<double>();
      EXPECT_LE((parameters[i].grad() - expected_gradients[i]).abs().max().item<double>(), 1e-5 * scale) << names[i];
    }
    optimizer.step();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor difference = without_key_bias(names[i], parameters[i].detach() - expected_trained[i]);
    EXPECT_LE(difference.abs().max().item<double>(), 1e-4) << names[i];
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace headroom
