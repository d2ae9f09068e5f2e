// The same chain, weights and input here and in PyTorch with
// torch.utils.checkpoint(use_reentrant=False).
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "execute/checkpoint_support.h"
#include "support/build_paths.h"

namespace headroom {
namespace {

using testing::peak_of;
using testing::TransformerBlock;
using torch::Tensor;

constexpr std::int64_t kBlocks = 12, kWidth = 64, kHeads = 4, kBatch = 8, kLength = 64;

void append(std::ofstream& file, const Tensor& tensor) {
  const Tensor flat = tensor.detach().contiguous();
  file.write(static_cast<const char*>(flat.data_ptr()),
             static_cast<std::streamsize>(flat.nbytes()));
}

// What the command prints and returns.
std::pair<std::string, int> run(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (!pipe) return {"", -1};
  std::string output;
  char piece[4096];
  while (const std::size_t count = std::fread(piece, 1, sizeof piece, pipe))
    output.append(piece, count);
  return {output, ::pclose(pipe)};
}

TEST(CheckpointParityTest, SameLossAndGradientsAsPyTorchAtNoHigherPeak) {
  const char* python = "/usr/bin/python3";
  const auto [torch_version, missing] =
      run(std::string(python) + " -c 'import torch, numpy; print(torch.__version__)' 2>&1");
  ASSERT_EQ(missing, 0) << "this test compares with PyTorch and needs " << python
                        << " with torch and numpy (Debian: python3-torch): " << torch_version;

  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) /
                                       ("headroom_parity_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  torch::manual_seed(3);
  std::vector<TransformerBlock> blocks;
  torch::nn::ModuleList all;
  for (std::int64_t i = 0; i < kBlocks; ++i) {
    blocks.emplace_back(kWidth, kHeads, 0.0);
    all->push_back(blocks.back());
  }
  const Tensor x = torch::randn({kBatch, kLength, kWidth});
  {
    std::ofstream weights(folder / "weights.bin", std::ios::binary),
        input(folder / "input.bin", std::ios::binary);
    for (const Tensor& parameter : all->parameters()) append(weights, parameter);
    append(input, x);
  }
  Tensor loss;
  const auto step = [&] {
    Tensor y = x;
    for (TransformerBlock& block : blocks) y = checkpoint(block, y);
    loss = y.pow(2).mean();
    loss.backward();
    loss = loss.detach();
  };
  step();
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : all->parameters())
    gradients.push_back(parameter.grad().flatten().clone());
  const std::int64_t peak_bytes = peak_of(step);

  std::string command = std::string(python) +
                        " " HEADROOM_SOURCE_DIR "/tests/execute/checkpoint_parity.py " +
                        folder.string();
  for (const std::int64_t number : {kBlocks, kWidth, kHeads, kBatch, kLength})
    command += " " + std::to_string(number);
  const auto [output, status] = run(command + " 2>&1");
  ASSERT_EQ(status, 0) << output;
  const nlohmann::json theirs = nlohmann::json::parse(output.substr(output.rfind('{')));
  const Tensor our_gradients = torch::cat(gradients);
  Tensor their_gradients = torch::empty_like(our_gradients);
  std::ifstream file(folder / "gradients.bin", std::ios::binary);
  file.read(static_cast<char*>(their_gradients.data_ptr()),
            static_cast<std::streamsize>(their_gradients.nbytes()));
  ASSERT_TRUE(file.good());
  std::filesystem::remove_all(folder);

  const double loss_difference =
      std::abs(loss.item<double>() - theirs["loss"].get<double>()) / theirs["loss"].get<double>();
  const double gradient_difference =
      ((our_gradients - their_gradients).norm() / their_gradients.norm()).item<double>();
  const auto their_peak = theirs["peak_bytes"].get<std::int64_t>();
  std::printf(
      "PyTorch %s: loss differs by %.1e, gradients by %.1e; peak %.2f MB here, %.2f MB there\n",
      theirs["version"].get<std::string>().c_str(), loss_difference, gradient_difference,
      static_cast<double>(peak_bytes) / 1e6, static_cast<double>(their_peak) / 1e6);
  EXPECT_LE(loss_difference, 1e-5);
  EXPECT_LE(gradient_difference, 1e-5);
  EXPECT_LE(peak_bytes, their_peak);
}

}  // namespace
}  // namespace headroom
