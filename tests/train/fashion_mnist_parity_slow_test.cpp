// The guide's experiment from PyTorch's initial weights: mlp 784-512-512-10, SGD, learning rate
// 1e-3, sequential order.
#include <headroom/core/runtime.h>
#include <headroom/data/dataset.h>
#include <headroom/model/zoo.h>
#include <headroom/train/trainer.h>

#include "support/build_paths.h"
#include "train/training_support.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

namespace headroom {
namespace {

using namespace headroom::testing;

constexpr const char* kData = "/usr/share/datasets/fashion-mnist";
constexpr std::size_t kUpdatesPerEpoch = 938;  // 937 of 64 samples and one of 32

class FashionMnistParity : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    const std::string script =
        std::string(HEADROOM_SOURCE_DIR) + "/tests/train/fashion_mnist_reference.py";
    const std::string command = "/usr/bin/python3 '" + script + "' " + kData + " '" +
                                folder_->path().string() + "' > '" + (*folder_ / "log") + "' 2>&1";
    if (std::system(command.c_str()) != 0)
      problem_ = "PyTorch's reference did not run (Debian: python3-torch, python3-numpy):\n" +
                 read_file(*folder_ / "log");
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  void SetUp() override { ASSERT_EQ(problem_, ""); }

  // The losses of one epoch, from PyTorch's initial weights.
  static std::vector<double> train(const std::string& name, std::int64_t micro_batch,
                                   const std::string& steps) {
    configure_threads(0);
    const ZooModel model = make_model("mlp", "");
    std::ifstream weights(*folder_ / "weights.bin", std::ios::binary);
    for (at::Tensor& parameter : model.chain.parameters()) {
      weights.read(static_cast<char*>(parameter.data_ptr()),
                   static_cast<std::streamsize>(parameter.nbytes()));
    }
    EXPECT_TRUE(weights && weights.peek() == EOF)
        << "weights.bin does not hold exactly the parameters";
    TrainingArguments arguments = plain_arguments(*folder_ / name);
    arguments.learning_rate = 1e-3;
    arguments.num_train_epochs = 1;
    arguments.per_device_train_batch_size = micro_batch;
    arguments.gradient_accumulation_steps = steps;
    Trainer(arguments, model.chain, open_idx_images(kData, true, 10)).train();
    std::vector<double> losses;
    for (const auto& line : metrics_of(arguments.output_dir)) losses.push_back(line["loss"]);
    return losses;
  }

  static const std::vector<double>& batch_64() {
    static const std::vector<double> losses = train("batch64", 64, "1");
    return losses;
  }

  static void expect_follows(const std::vector<double>& ours, const std::vector<double>& theirs,
                             std::size_t count, double tolerance) {
    ASSERT_GE(ours.size(), count);
    ASSERT_GE(theirs.size(), count);
    double worst = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      const double difference = std::abs(ours[i] - theirs[i]) / theirs[i];
      worst = std::max(worst, difference);
      ASSERT_LE(difference, tolerance)
          << "update " << i + 1 << ": " << ours[i] << " against " << theirs[i];
    }
    RecordProperty("worst_relative_difference", std::to_string(worst));
    std::printf("worst relative difference over %zu updates: %.2g\n", count, worst);
  }

  static inline TemporaryFolder* folder_ = nullptr;
  static inline std::string problem_;
};

TEST_F(FashionMnistParity, Batch64FollowsPyTorch) {
  std::vector<double> theirs;
  std::ifstream file(*folder_ / "losses.txt");
  for (double loss = 0; file >> loss;) theirs.push_back(loss);
  ASSERT_EQ(theirs.size(), kUpdatesPerEpoch);
  ASSERT_EQ(batch_64().size(), kUpdatesPerEpoch);
  expect_follows(batch_64(), theirs, 200, 1e-5);
  std::printf("the last, partial window: %.9g against %.9g\n", batch_64().back(), theirs.back());
  EXPECT_NEAR(batch_64().back(), theirs.back(), 1e-4 * theirs.back());
}

TEST_F(FashionMnistParity, SixteenTimesFourFollowsBatch64ToTheEndOfTheEpoch) {
  const std::vector<double> accumulated = train("accumulated", 16, "4");
  ASSERT_EQ(accumulated.size(), kUpdatesPerEpoch);
  expect_follows(accumulated, batch_64(), kUpdatesPerEpoch, 1e-5);
}

TEST_F(FashionMnistParity, OneEpochReachesTheAccuracyOfTheGuide) {
  TrainingArguments arguments = plain_arguments(*folder_ / "guide");
  arguments.learning_rate = 1e-3;
  arguments.num_train_epochs = 1;
  arguments.per_device_train_batch_size = 16;
  arguments.gradient_accumulation_steps = "4";
  arguments.logging_steps = 500;
  seed_everything(42);
  const TrainResults results =
      Trainer(arguments, make_model("mlp", "").chain, open_idx_images(kData, true, 10),
              open_idx_images(kData, false, 10))
          .train();
  ASSERT_TRUE(results.eval.has_value());
  std::printf("accuracy after one epoch: %.2f%%\n", 100 * results.eval->accuracy.value());
  EXPECT_NEAR(results.eval->accuracy.value(), 0.495, 0.06)
      << "49.5% in PyTorch, and some points more or less by the seed";
}

}  // namespace
}  // namespace headroom
