#pragma once

// A chain against PyTorch's model from the same weights and data: losses, every gradient, and some
// AdamW updates. A Python program is given the weights in a folder and leaves there what it
// computed.

#include <headroom/model/chain.h>

#include "model/chain_runs.h"
#include "model/published.h"
#include "support/build_paths.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace headroom::testing {

inline constexpr std::int64_t kParityUpdates = 20;

/// One micro-batch for each of `texts` (updates, B, T + 1), each token to be guessed from those
/// before it.
inline std::vector<MicroBatch> text_batches(const at::Tensor& texts) {
  const std::int64_t num_samples = texts.size(1), length = texts.size(2) - 1;
  std::vector<MicroBatch> batches;
  for (const at::Tensor& text : texts.unbind()) {
    batches.push_back({{text.slice(1, 0, length).contiguous()},
                       {text.slice(1, 1).contiguous()},
                       num_samples,
                       num_samples * length});
  }
  return batches;
}

class ParityRun {
 public:
  ParityRun(const std::string& name, Chain chain)
      : folder_((std::filesystem::temp_directory_path() /
                 fmt::format("headroom-parity-{}-{}", name, ::getpid()))
                    .string()),
        chain_(std::move(chain)),
        parameters_(chain_.parameters()) {
    std::filesystem::create_directories(folder_);
    {
      // Larger weights than the initial ones, so that every part of the model matters to the loss.
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& p : parameters_) p.add_(torch::randn_like(p) * 0.05);
    }
    std::ofstream index(folder_ + "/index.txt");
    for (const auto& item : chain_.named_parameters()) {
      names_.push_back(item.first);
      const auto names = published_names(published_form(chain_), item.first);
      index << fmt::format("{}\n", fmt::join(names, " "));
    }
    write("weights.bin", parameters_);
  }
  ~ParityRun() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  ParityRun(const ParityRun&) = delete;
  ParityRun& operator=(const ParityRun&) = delete;

  const Chain& chain() const { return chain_; }

  void write(const std::string& name, const std::vector<at::Tensor>& tensors) const {
    std::ofstream file(folder_ + "/" + name, std::ios::binary);
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor plain = tensor.detach().contiguous();
      file.write(static_cast<const char*>(plain.data_ptr()),
                 static_cast<std::streamsize>(plain.nbytes()));
    }
  }
  void write_text(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
  }

  /// Runs `script parity FOLDER`, then the same updates here, one per micro-batch: the first loss
  /// and its gradients for every option of the stages to 1e-5, later losses and the weights at the
  /// end to 1e-4.
  void compare(const std::string& script, const std::vector<MicroBatch>& batches) const {
    const std::string command =
        fmt::format("/usr/bin/python3 {}/{} parity {}", HEADROOM_SOURCE_DIR, script, folder_);
    ASSERT_EQ(std::system(command.c_str()), 0)
        << "PyTorch is needed to compare with (Debian: python3-torch). The command was: "
        << command;
    std::vector<double> losses;
    std::ifstream file(folder_ + "/losses.txt");
    for (double loss = 0.0; file >> loss;) losses.push_back(loss);
    ASSERT_EQ(losses.size(), batches.size());
    for (int option = 4; option > 0; --option) {
      compare_gradients(mean_loss(batches[0], option), losses[0]);
      take_gradients(chain_);
    }
    torch::optim::AdamW optimizer(parameters_, torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
    for (std::size_t update = 0; update < batches.size(); ++update) {
      optimizer.zero_grad();
      const at::Tensor loss = mean_loss(batches[update], 0);
      if (update == 0) {
        compare_gradients(loss, losses[0]);
      } else {
        loss.backward();
        EXPECT_NEAR(loss.item<double>(), losses[update], 1e-4 * losses[update])
            << "update " << update;
      }
      optimizer.step();
    }
    const std::vector<at::Tensor> trained = read("trained.bin");
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor difference =
          without_key_bias(names_[i], parameters_[i].detach() - trained[i]);
      EXPECT_LE(difference.abs().max().item<double>(), 1e-4) << names_[i];
    }
  }

 private:
  at::Tensor mean_loss(const MicroBatch& micro, int option) const {
    return loss_of(chain_, micro, option) / static_cast<double>(micro.num_items);
  }

  void compare_gradients(const at::Tensor& loss, double expected_loss) const {
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), expected_loss, 1e-5 * expected_loss);
    const std::vector<at::Tensor> expected = read("gradients.bin");
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const double scale = expected[i].abs().max().item<double>();
      EXPECT_LE((parameters_[i].grad() - expected[i]).abs().max().item<double>(), 1e-5 * scale)
          << names_[i];
    }
  }

  // The gradient of the bias of the keys is 0 in exact arithmetic (it shifts all scores of a query
  // alike). What is computed is noise, which AdamW scales up to whole steps: it says nothing.
  static at::Tensor without_key_bias(const std::string& name, const at::Tensor& tensor) {
    if (name.find("c_attn.bias") == std::string::npos && name.find("qkv.bias") == std::string::npos)
      return tensor;
    const std::int64_t width = tensor.size(0) / 3;
    return torch::cat({tensor.slice(0, 0, width), tensor.slice(0, 2 * width)});
  }

  // Floats of a file, cut into tensors of the sizes of the parameters.
  std::vector<at::Tensor> read(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name, std::ios::binary);
    std::vector<at::Tensor> tensors;
    for (const at::Tensor& parameter : parameters_) {
      at::Tensor values = torch::empty(parameter.sizes());
      file.read(static_cast<char*>(values.data_ptr()),
                static_cast<std::streamsize>(values.nbytes()));
      EXPECT_TRUE(file.good()) << name << " is too short";
      tensors.push_back(values);
    }
    return tensors;
  }

  std::string folder_;
  Chain chain_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
};

}  // namespace headroom::testing
