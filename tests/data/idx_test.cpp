#include <headroom/data/dataset.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>

#include "support/idx_files.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using namespace headroom::testing;

std::string message_of(const std::string& folder, bool train = true,
                       std::int64_t num_classes = 256) {
  try {
    open_idx_images(folder, train, num_classes);
  } catch (const DataError& error) {
    return error.what();
  }
  return "(no DataError)";
}

class IdxImages : public ::testing::TestWithParam<bool> {  // gzip?
 protected:
  void write(const std::string& name, const std::string& bytes) {
    std::filesystem::remove(folder_ / name);
    std::filesystem::remove(folder_ / (name + ".gz"));
    GetParam() ? write_gzip(folder_ / (name + ".gz"), bytes) : write_plain(folder_ / name, bytes);
  }
  std::string file(const std::string& name) const {
    return folder_ / (GetParam() ? name + ".gz" : name);
  }

  void expect_failure(const std::string& name, const std::string& bytes,
                      const std::vector<std::string>& parts) {
    write_idx_dataset(folder_.path().string(), 6, GetParam());
    write(name, bytes);
    const std::string message = message_of(folder_.path().string());
    EXPECT_NE(message.find(file(name)), std::string::npos) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos)
          << "expected '" << part << "' in: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }

  TemporaryFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(PlainAndGzip, IdxImages, ::testing::Bool());

TEST_P(IdxImages, PixelsBecomeFloatsFromZeroToOneAndLabelsNumbers) {
  write_idx_dataset(folder_.path().string(), 6, GetParam(), 4, 5);
  const auto data = open_idx_images(folder_.path().string(), true, 10);
  EXPECT_EQ(data->size(), 6);
  const MicroBatch batch = data->load({4, 0, 5});
  ASSERT_EQ(batch.inputs.size(), 1U);
  EXPECT_EQ(batch.inputs[0].sizes(), (std::vector<std::int64_t>{3, 1, 4, 5}));
  EXPECT_EQ(batch.num_samples, 3);
  EXPECT_EQ(batch.num_items, 3);
  const at::Tensor pixels = torch::arange(20).to(torch::kFloat).reshape({1, 4, 5});
  EXPECT_TRUE(torch::equal(batch.inputs[0][0], (pixels + 4) / 255));
  EXPECT_TRUE(torch::equal(batch.inputs[0][1], pixels / 255));
  EXPECT_TRUE(torch::equal(batch.targets.at(0), torch::tensor({4, 0, 5}, torch::kLong)));
  EXPECT_EQ(open_idx_images(folder_.path().string(), false)->size(), 3);
}

TEST_P(IdxImages, EveryByteValueIsWhatPyTorchMakesOfIt) {
  write_idx_dataset(folder_.path().string(), 1, GetParam(), 16, 16);
  const MicroBatch batch = open_idx_images(folder_.path().string(), true)->load({0});
  // ToTensor divides a float tensor by 255.
  EXPECT_TRUE(
      torch::equal(batch.inputs[0].flatten(), torch::arange(256).to(torch::kFloat).div(255)));
}

TEST_P(IdxImages, OnlyTheBatchOccupiesTensorMemory) {
  write_idx_dataset(folder_.path().string(), 100, GetParam());
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  const auto data = open_idx_images(folder_.path().string(), true);
  EXPECT_EQ(meter.live_bytes(), before);
  meter.reset_peak();
  const MicroBatch batch = data->load({0, 1, 2, 3});
  EXPECT_EQ(meter.peak_bytes() - before, 4 * (28 * 28 * 4 + 8))
      << "pixels as floats and labels, and no copy beside them";
}

TEST_P(IdxImages, AFileThatEndsEarlyIsNamedWithTheOffset) {
  const std::string images = idx_images(6);
  expect_failure(kTrainImages, images.substr(0, 3000), {"at byte 3000", "1720 more bytes"});
  expect_failure(kTrainImages, images.substr(0, 2), {"at byte 2", "magic number", "2 more bytes"});
  expect_failure(kTrainImages, images.substr(0, 9), {"at byte 9", "sizes"});
  expect_failure(kTrainImages, images.substr(0, images.size() - 1), {"1 more bytes"});
  expect_failure(kTrainLabels, idx_labels(6).substr(0, 10), {"at byte 10", "4 more bytes"});
  expect_failure(kTrainImages, "", {"at byte 0", "magic number"});
}

TEST_P(IdxImages, AHeaderThatIsWrongIsNamedWithWhatWasExpected) {
  std::string images = idx_images(6);
  images[3] = 1;
  expect_failure(kTrainImages, images, {"at byte 0", "00000803", "00000801"});
  images[3] = 3;
  images[2] = 0x0d;
  expect_failure(kTrainImages, images, {"00000d03"});
  expect_failure(kTrainImages, "not an IDX file at all", {"at byte 0", "magic number"});
  expect_failure(kTrainImages, idx_header({0, 28, 28}), {"at byte 4", "0"});
  expect_failure(kTrainImages, idx_header({0xffffffffU, 0xffffffffU, 0xffffffffU}), {"64 GiB"});
  expect_failure(kTrainImages, idx_header({40000000, 28, 28}) + "short",
                 {"the file ends", "more bytes"});
  expect_failure(kTrainImages, idx_images(6) + "x", {"goes on"});
}

TEST_P(IdxImages, FilesThatDoNotMatchAreNamedWithTheirCounts) {
  write_idx_dataset(folder_.path().string(), 6, GetParam());
  write(kTrainLabels, idx_labels(5));
  const std::string message = message_of(folder_.path().string());
  for (const std::string& part :
       {file(kTrainImages), file(kTrainLabels), std::string("6 images"), std::string("5 labels")}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST_P(IdxImages, ALabelBeyondTheClassesIsNamedWithItsPlace) {
  write_idx_dataset(folder_.path().string(), 12, GetParam());
  const std::string message = message_of(folder_.path().string(), true, 9);
  for (const std::string& part : {file(kTrainLabels), std::string("at byte 17"),
                                  std::string("label 9"), std::string("0 to 8")}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_EQ(message_of(folder_.path().string(), true, 10), "(no DataError)");
}

TEST(IdxFiles, CorruptCompressedDataIsNamed) {
  TemporaryFolder folder;
  write_idx_dataset(folder.path().string(), 200, true);
  const std::string path = folder / (std::string(kTrainImages) + ".gz");
  const std::string whole = read_file(path);

  std::string flipped = whole;
  for (std::size_t i = whole.size() / 2; i < whole.size() / 2 + 8; ++i)
    flipped[i] = static_cast<char>(~flipped[i]);
  write_plain(path, flipped);
  EXPECT_NE(message_of(folder.path().string()).find(path), std::string::npos);

  std::string wrong_checksum = whole;
  wrong_checksum[whole.size() - 6] = static_cast<char>(~wrong_checksum[whole.size() - 6]);
  write_plain(path, wrong_checksum);
  EXPECT_NE(message_of(folder.path().string()).find(path), std::string::npos);

  write_plain(path, whole.substr(0, whole.size() / 2));
  EXPECT_NE(message_of(folder.path().string()).find("the file ends"), std::string::npos);

  for (std::size_t cut = 1; cut <= 8; ++cut) {  // in the checksum and the length at its end
    write_plain(path, whole.substr(0, whole.size() - cut));
    const std::string message = message_of(folder.path().string());
    EXPECT_NE(message.find("cut at its end"), std::string::npos) << cut << ": " << message;
  }

  write_plain(path, whole);
  EXPECT_EQ(message_of(folder.path().string()), "(no DataError)");
}

TEST(IdxFiles, AMissingFileOrFolderIsNamed) {
  TemporaryFolder folder;
  EXPECT_NE(message_of(folder / "absent").find(folder / "absent"), std::string::npos);
  EXPECT_NE(message_of(folder.path().string()).find(kTrainImages), std::string::npos);
  write_plain(folder / "file", "");
  EXPECT_NE(message_of(folder / "file").find("no such folder"), std::string::npos);
}

}  // namespace
}  // namespace headroom
