// FashionMNIST written out as 70,000 PNG files trains the model that its arrays train.
#include "apps/program.h"
#include "support/image_files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>

namespace headroom::testing {
namespace {

constexpr std::size_t kSide = 28, kPixels = kSide * kSide;

// The bytes behind the header of an IDX file.
std::string read_idx(const std::string& name, std::size_t header_bytes) {
  const std::string path = "/usr/share/datasets/fashion-mnist/" + name;
  const gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) return {};
  std::string bytes(std::size_t{1} << 26, '\0');
  bytes.resize(static_cast<std::size_t>(
      std::max(0, gzread(file, bytes.data(), static_cast<unsigned>(bytes.size())))));
  gzclose(file);
  return bytes.substr(std::min(header_bytes, bytes.size()));
}

// As PNG files in class folders, and as IDX files in the order of those.
void write_part(const TemporaryFolder& folder, const std::string& part, const std::string& idx) {
  const std::string images = read_idx(idx + "-images-idx3-ubyte.gz", 16),
                    labels = read_idx(idx + "-labels-idx1-ubyte.gz", 8);
  ASSERT_EQ(images.size(), labels.size() * kPixels);
  ASSERT_GE(labels.size(), 10000U) << "FashionMNIST is needed (scripts/install-packages)";
  std::vector<std::size_t> order(labels.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return labels[a] < labels[b]; });
  const auto num_samples = static_cast<std::uint32_t>(order.size());
  std::string all_images = idx_header({num_samples, kSide, kSide}),
              all_labels = idx_header({num_samples});
  for (const std::size_t i : order) {
    const std::string image = images.substr(i * kPixels, kPixels);
    write_png(folder / fmt::format("png/{}/{}/{:05}.png", part, static_cast<int>(labels[i]), i),
              kSide, kSide, 1, {image.begin(), image.end()});
    all_images += image;
    all_labels += labels[i];
  }
  std::filesystem::create_directories(folder / "idx");
  write_gzip(folder / ("idx/" + idx + "-images-idx3-ubyte.gz"), all_images);
  write_gzip(folder / ("idx/" + idx + "-labels-idx1-ubyte.gz"), all_labels);
}

TEST(ImageFolder, OfFashionMnistGivesTheHashOfItsArrays) {
  const TemporaryFolder folder;
  ASSERT_NO_FATAL_FAILURE(write_part(folder, "train", "train"));
  ASSERT_NO_FATAL_FAILURE(write_part(folder, "val", "t10k"));
  const auto train = [&](const std::string& dataset, const std::string& num_workers) {
    const Outcome outcome = run_program(
        {"train", "--model", "mlp", "--dataset", folder / dataset, "--dataloader_num_workers",
         num_workers, "--global_batch_size", "256", "--per_device_train_batch_size", "64",
         "--num_train_epochs", "1", "--output_dir", folder / "run", "--disable_tqdm", "--json"},
        folder);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    const auto results = nlohmann::json::parse(outcome.out);
    EXPECT_EQ(results.at("global_step"), 235) << "60,000 samples";
    return std::pair(results.at("weights_sha256").get<std::string>(),
                     results.at("eval_loss").get<double>());
  };
  const auto expected = train("idx", "0");
  EXPECT_EQ(train("png", "2"), expected);
  EXPECT_EQ(train("png", "0"), expected);
}

}  // namespace
}  // namespace headroom::testing
