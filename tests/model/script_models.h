#pragma once

// TorchScript models that a Python program writes for the tests, with data and a loss for each.

#include <headroom/model/chain.h>

#include "support/build_paths.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace headroom::testing {

/// A folder of models, which is gone at the end.
class ScriptModels {
 public:
  /// `what` goes to script_models.py behind the folder.
  explicit ScriptModels(const std::string& what = "")
      : folder_((std::filesystem::temp_directory_path() /
                 fmt::format("headroom-scripts-{}-{}", ::getpid(), what.size()))
                    .string()) {
    std::filesystem::create_directories(folder_);
    const std::string command =
        fmt::format("/usr/bin/python3 {}/tests/model/script_models.py {} {}", HEADROOM_SOURCE_DIR,
                    folder_, what);
    EXPECT_EQ(std::system(command.c_str()), 0)
        << "PyTorch is needed to write models (Debian: python3-torch). The command was: "
        << command;
  }
  ~ScriptModels() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  ScriptModels(const ScriptModels&) = delete;
  ScriptModels& operator=(const ScriptModels&) = delete;

  std::string path(const std::string& name) const { return folder_ + "/" + name + ".pt"; }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

/// Depends on every element of every output, each in its own way.
inline at::Tensor weigh_everything(const std::vector<at::Tensor>& outputs, const MicroBatch&) {
  at::Tensor loss;
  for (const at::Tensor& output : outputs) {
    if (!output.is_floating_point()) continue;
    const at::Tensor flat = output.flatten();
    const at::Tensor one = (flat * torch::linspace(-1, 1, flat.numel()) + flat.pow(2) * 0.1).sum();
    loss = loss.defined() ? loss + one : one;
  }
  return loss;
}

/// Samples that the model of this name reads.
inline MicroBatch samples_for(const std::string& name, std::int64_t count) {
  MicroBatch micro;
  micro.num_samples = micro.num_items = count;
  if (name == "unet" || name.rfind("resnet", 0) == 0) {
    micro.inputs = {torch::randn({count, 1, 16, 16})};
  } else if (name == "t5") {
    micro.inputs = {torch::randint(0, 64, {count, 12}), torch::randint(1, 64, {count, 9})};
  } else if (name == "lstm") {
    micro.inputs = {torch::randint(0, 32, {count, 7})};
  } else {
    micro.inputs = {torch::randn({count, 16})};
  }
  micro.targets = {torch::randint(0, 10, {count})};
  return micro;
}

}  // namespace headroom::testing
