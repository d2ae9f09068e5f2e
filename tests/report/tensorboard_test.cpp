#include "report/tensorboard.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

// Bit by bit, unlike the writer's table.
std::uint32_t masked_crc(const std::string& bytes) {
  std::uint32_t crc = 0xffffffffU;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1U) != 0 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;
  }
  crc ^= 0xffffffffU;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
}

std::vector<std::string> read_records(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream all;
  all << file.rdbuf();
  const std::string bytes = all.str();
  std::vector<std::string> records;
  std::size_t at = 0;
  while (at < bytes.size()) {
    std::uint64_t length = 0;
    std::uint32_t length_crc = 0;
    std::uint32_t data_crc = 0;
    std::memcpy(&length, bytes.data() + at, 8);
    std::memcpy(&length_crc, bytes.data() + at + 8, 4);
    EXPECT_EQ(length_crc, masked_crc(bytes.substr(at, 8)));
    records.push_back(bytes.substr(at + 12, length));
    std::memcpy(&data_crc, bytes.data() + at + 12 + length, 4);
    EXPECT_EQ(data_crc, masked_crc(records.back()));
    at += 16 + length;
  }
  return records;
}

TEST(TensorBoard, CrcIsTheOneOfTheFormat) {
  // The check value of CRC-32C: of "123456789" it is e3069283.
  const std::uint32_t crc = 0xe3069283U;
  EXPECT_EQ(masked_crc("123456789"), ((crc >> 15) | (crc << 17)) + 0xa282ead8U);
}

TEST(TensorBoard, WritesOneRecordForTheVersionAndOneForEachScalar) {
  const fs::path folder =
      fs::temp_directory_path() / ("headroom_tensorboard" + std::to_string(::getpid()));
  fs::create_directories(folder);
  {
    TensorBoardWriter writer(folder.string());
    writer.add_scalar("train/loss", 1.5, 300);
    writer.add_scalar("train/loss", 1.25, 301);
  }
  std::vector<std::string> records;
  for (const auto& entry : fs::directory_iterator(folder)) records = read_records(entry.path());
  fs::remove_all(folder);
  ASSERT_EQ(records.size(), 3U);
  EXPECT_NE(records[0].find("brain.Event:2"), std::string::npos);
  // time: key 09 and 8 bytes; step: key 10, varint 300 = ac 02; summary: key 2a, 19 bytes; value:
  // key 0a, 17 bytes; tag; 1.5f.
  const std::string expected =
      std::string("\x10\xac\x02\x2a\x13\x0a\x11\x0a\x0atrain/loss\x15", 20) +
      std::string("\x00\x00\xc0\x3f", 4);
  EXPECT_EQ(records[1].substr(9), expected);
}

TEST(TensorBoard, AFolderThatCannotBeWrittenIsAConfigError) {
  EXPECT_THROW(TensorBoardWriter("/dev/null/below"), ConfigError);
}

}  // namespace
}  // namespace headroom
