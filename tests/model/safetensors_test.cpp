#include <headroom/model/safetensors.h>

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>

#include "support/idx_files.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/stat.h>

#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using testing::read_file;
using testing::TemporaryFolder;
using testing::write_plain;
using TensorList = std::vector<std::pair<std::string, at::Tensor>>;

std::string with_length(const std::string& json) {
  std::string bytes;
  for (int byte = 0; byte < 8; ++byte)
    bytes += static_cast<char>((json.size() >> (8 * byte)) & 0xff);
  return bytes + json;
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return fmt::format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{}]}})", dtype, shape, offsets);
}

std::string ones(int count) {
  std::string text = "1";
  for (int i = 1; i < count; ++i) text += ",1";
  return text;
}

TEST(Safetensors, RoundTripOfEveryDtype) {
  const TemporaryFolder folder;
  TensorList tensors;
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                    at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(c10::toString(type), torch::randint(0, 2, {3, 5}, torch::kLong).to(type));
  }
  tensors.emplace_back("scalar", torch::full({}, 7.5));
  tensors.emplace_back("empty", torch::empty({0, 4}));
  tensors.emplace_back("name with \"quotes\", ä and \\", torch::randn({1}));
  save_safetensors(folder / "a.safetensors", tensors);
  const auto loaded = load_safetensors(folder / "a.safetensors");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(loaded.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::equal(loaded.at(name), tensor)) << name;
  }
}

TEST(Safetensors, ViewsAreSavedAndFilledInPlace) {
  const TemporaryFolder folder;
  const at::Tensor matrix = torch::randn({700, 900});  // some pieces of a MiB
  save_safetensors(folder / "a.safetensors", {{"t", matrix.t()}, {"rows", matrix.narrow(0, 3, 5)}});
  const auto plain = load_safetensors(folder / "a.safetensors");
  EXPECT_TRUE(torch::equal(plain.at("t"), matrix.t()));
  EXPECT_TRUE(torch::equal(plain.at("rows"), matrix.narrow(0, 3, 5)));
  const at::Tensor back = torch::zeros({700, 900}), rows = torch::zeros({9, 900});
  load_safetensors(folder / "a.safetensors", {{"t", back.t()}, {"rows", rows.narrow(0, 2, 5)}});
  EXPECT_TRUE(torch::equal(back, matrix));
  EXPECT_TRUE(torch::equal(rows.narrow(0, 2, 5), matrix.narrow(0, 3, 5)));
  EXPECT_EQ(rows.narrow(0, 0, 2).abs().sum().item<float>(), 0.0F);
}

TEST(Safetensors, ConvertsOnTheWay) {
  const TemporaryFolder folder;
  const at::Tensor values = torch::randn({300, 1000}, at::kDouble);
  for (const at::ScalarType saved : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    save_safetensors(folder / "a.safetensors", {{"x", values.to(saved)}});
    for (const at::ScalarType wanted : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const at::Tensor into = torch::zeros({300, 1000}, wanted);
      load_safetensors(folder / "a.safetensors", {{"x", into}});
      EXPECT_TRUE(torch::equal(into, values.to(saved).to(wanted))) << saved << wanted;
    }
  }
  EXPECT_THROW(
      load_safetensors(folder / "a.safetensors", {{"x", torch::zeros({300, 1000}, at::kLong)}}),
      DataError);
  EXPECT_THROW(load_safetensors(folder / "a.safetensors", {{"x", torch::zeros({1000, 300})}}),
               DataError);
}

// A byte that is neither 0 nor 1 is no bool, whatever reads it later.
TEST(Safetensors, BoolsAreZeroOrOne) {
  const TemporaryFolder folder;
  write_plain(folder / "a.safetensors",
              with_length("{\"x\":" + entry("BOOL", "3", "0,3") + "}") + std::string("\0\1\2", 3));
  const at::Tensor x = load_safetensors(folder / "a.safetensors").at("x");
  EXPECT_TRUE(torch::equal(x.view(at::kByte), torch::tensor({0, 1, 1}, at::kByte)));
}

TEST(Safetensors, TakesNoMemoryBesideTheTensors) {
  const TemporaryFolder folder;
  const at::Tensor matrix = torch::randn({2000, 1500});
  MemoryMeter& meter = MemoryMeter::instance();
  meter.reset_peak();
  const std::int64_t before = meter.live_bytes();
  save_safetensors(folder / "a.safetensors", {{"t", matrix.t()}, {"m", matrix}});
  EXPECT_LT(meter.peak_bytes() - before, 100'000);
  load_safetensors(folder / "a.safetensors", {{"t", matrix.t()}, {"m", matrix}});
  EXPECT_LT(meter.peak_bytes() - before, 100'000);
}

TEST(Safetensors, NamesMustBeThoseOfTheFile) {
  const TemporaryFolder folder;
  save_safetensors(folder / "a.safetensors", {{"x", torch::ones({2})}, {"y", torch::ones({2})}});
  const at::Tensor x = torch::zeros({2});
  EXPECT_THROW(load_safetensors(folder / "a.safetensors", {{"x", x}}), DataError);
  EXPECT_THROW(load_safetensors(folder / "a.safetensors", {{"x", x}, {"y", x}, {"z", x}}),
               DataError);
  EXPECT_EQ(x.sum().item<float>(), 0.0F) << "nothing is changed before the names are checked";
  EXPECT_THROW(save_safetensors(folder / "b.safetensors", {{"x", x}, {"x", x}}), ConfigError);
  EXPECT_THROW(
      save_safetensors(folder / "b.safetensors", {{"x", torch::zeros({2}, at::kComplexFloat)}}),
      ConfigError);
  EXPECT_THROW(save_safetensors(folder / "none/b.safetensors", {{"x", x}}), ConfigError);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1)
      << "a failed save leaves nothing";
}

TEST(Safetensors, MalformedFilesAreRefused) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors", four(4, '\0'), eight(8, '\0');
  const std::string x = "\"x\":", y = "\"y\":";
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"empty", ""},
      {"short", "\1\2\3"},
      {"length above the file", std::string("\xff\xff\0\0\0\0\0\0", 8) + "{}"},
      {"length 2^63", std::string("\0\0\0\0\0\0\0\x80", 8) + "{}"},
      {"no JSON", with_length("nonsense")},
      {"JSON that stops", with_length("{\"x\":{\"dtype\"")},
      {"a list", with_length("[]")},
      {"text after it", with_length("{} {}")},
      {"deep", with_length("{\"x\":" + std::string(100'000, '['))},
      {"data without tensors", with_length("{}") + four},
      {"unknown dtype", with_length("{" + x + entry("F8_E4M3", "4", "0,4") + "}") + four},
      {"dtype missing", with_length(R"({"x":{"shape":[1],"data_offsets":[0,4]}})") + four},
      {"key twice in a tensor",
       with_length(R"({"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})") +
           four},
      {"unknown key",
       with_length(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":"z"}})") + four},
      {"negative", with_length("{" + x + entry("F32", "-1", "0,4") + "}") + four},
      {"fraction", with_length("{" + x + entry("F32", "1.0", "0,4") + "}") + four},
      {"above 2^63",
       with_length("{" + x + entry("F32", "18446744073709551615", "0,4") + "}") + four},
      {"shape overflows",
       with_length("{" + x + entry("F32", "4294967296,4294967296,4294967297", "0,4") + "}") + four},
      {"empty shape overflows",
       with_length("{" + x + entry("F32", "0,4611686018427387904,4611686018427387904", "0,0") +
                   "}")},
      {"many dimensions", with_length("{" + x + entry("F32", ones(65), "0,4") + "}") + four},
      {"bytes do not fit the shape", with_length("{" + x + entry("F32", "2", "0,4") + "}") + four},
      {"backwards", with_length("{" + x + entry("F32", "1", "4,0") + "}") + four},
      {"three offsets", with_length("{" + x + entry("F32", "1", "0,2,4") + "}") + four},
      {"beyond the end", with_length("{" + x + entry("F32", "2", "0,8") + "}") + four},
      {"bytes left over", with_length("{" + x + entry("F32", "1", "0,4") + "}") + eight},
      {"hole at the start", with_length("{" + x + entry("F32", "1", "4,8") + "}") + eight},
      {"overlap",
       with_length("{" + x + entry("F32", "1", "0,4") + "," + y + entry("F32", "1", "0,4") + "}") +
           four},
      {"hole",
       with_length("{" + x + entry("F32", "1", "0,4") + "," + y + entry("F32", "1", "8,12") + "}") +
           four + eight},
      {"name twice",
       with_length("{" + x + entry("F32", "1", "0,4") + "," + x + entry("F32", "1", "4,8") + "}") +
           eight},
      {"metadata of numbers", with_length(R"({"__metadata__":{"a":1}})")},
      {"metadata in depth", with_length(R"({"__metadata__":{"a":{"b":"c"}}})")},
      {"no UTF-8", with_length("{\"\xff\":" + entry("F32", "1", "0,4") + "}") + four},
  };
  for (const auto& [what, bytes] : bad) {
    write_plain(path, bytes);
    EXPECT_THROW(load_safetensors(path), DataError) << what;
  }
  write_plain(path, with_length("{" + x + entry("F32", "1", "0,4") + "}  ") + four);
  EXPECT_NO_THROW(load_safetensors(path)) << "what the bad ones were made from is good";
}

TEST(Safetensors, HeaderAboveTheLimitIsRefusedUnread) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  write_plain(path, std::string("\1\xe1\xf5\5\0\0\0\0", 8));  // 100,000,001
  std::filesystem::resize_file(path, 200'000'000);            // a hole, which takes no disk
  try {
    load_safetensors(path);
    FAIL();
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("100 MB"), std::string::npos) << error.what();
  }
}

TEST(Safetensors, OtherThanFilesAreRefusedAtOnce) {
  const TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const std::string& path :
       {folder / "pipe", folder / "absent", folder.path().string(), std::string("/dev/zero")}) {
    EXPECT_THROW(load_safetensors(path), DataError) << path;
  }
}

TEST(Safetensors, AFileThatIsCutMeanwhileIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  save_safetensors(path, {{"x", torch::ones({100'000})}});
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, 5000);
  EXPECT_THROW(reader.read(*reader.find("x"), torch::empty({100'000})), DataError);
}

TEST(Safetensors, FlippedBitsOfAHeaderAreRefusedOrHarmless) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.safetensors";
  TensorList tensors = {{"block0.weight", torch::randn({4, 6})},
                        {"block0.bias", torch::randn({4}).to(at::kBFloat16)},
                        {"block1.weight", torch::randn({2, 12}, at::kDouble)},
                        {"steps", torch::randint(0, 9, {3}, at::kLong)}};
  save_safetensors(path, tensors);
  const std::string good = read_file(path);
  const std::size_t header_bytes =
      8 + (static_cast<unsigned char>(good[0]) + 256U * static_cast<unsigned char>(good[1]));
  std::mt19937 random(5);
  int num_refused = 0;
  for (int flip = 0; flip < 500; ++flip) {
    std::string bytes = good;
    bytes[random() % header_bytes] ^= static_cast<char>(1 << (random() % 8));
    write_plain(path, bytes);
    TensorList into;
    for (const auto& [name, tensor] : tensors) into.emplace_back(name, torch::zeros_like(tensor));
    try {
      load_safetensors(path, into);
    } catch (const DataError&) {
      ++num_refused;
      continue;
    }
    for (std::size_t i = 0; i < into.size(); ++i)
      ASSERT_TRUE(torch::equal(into[i].second, tensors[i].second)) << "flip " << flip;
  }
  EXPECT_GT(num_refused, 400);
}

class Shards : public ::testing::Test {
 protected:
  Shards() {
    save_safetensors(folder_ / "model-00001-of-00002.safetensors", {{"x", torch::ones({2})}});
    save_safetensors(folder_ / "model-00002-of-00002.safetensors",
                     {{"y", torch::full({3}, 2.0)}, {"z", torch::zeros({1})}});
  }
  void write_index(const std::string& map) const {
    write_plain(folder_ / "model.safetensors.index.json",
                fmt::format(R"({{"metadata":{{"total_size":24}},"weight_map":{{{}}}}})", map));
  }
  TemporaryFolder folder_;
  const std::string good_ =
      R"("x":"model-00001-of-00002.safetensors","y":"model-00002-of-00002.safetensors",)"
      R"("z":"model-00002-of-00002.safetensors")";
};

TEST_F(Shards, AreReadAsOne) {
  write_index(good_);
  const auto loaded = load_safetensors(folder_.path().string());
  EXPECT_EQ(loaded.size(), 3U);
  EXPECT_EQ(loaded.at("y").sum().item<float>(), 6.0F);
  EXPECT_EQ(load_safetensors(folder_ / "model.safetensors.index.json").size(), 3U);
}

TEST_F(Shards, ThatDoNotFitTheIndexAreRefused) {
  const std::vector<std::string> bad = {
      R"("x":"model-00001-of-00002.safetensors","y":"model-00002-of-00002.safetensors")",
      good_ + R"(,"w":"model-00001-of-00002.safetensors")",
      R"("x":"model-00002-of-00002.safetensors","y":"model-00002-of-00002.safetensors",)"
      R"("z":"model-00001-of-00002.safetensors")",
      good_ + R"(,"w":"absent.safetensors")",
      good_ + R"(,"w":"../elsewhere.safetensors")",
      good_ + R"(,"w":7)",
  };
  for (const std::string& map : bad) {
    write_index(map);
    EXPECT_THROW(load_safetensors(folder_.path().string()), DataError) << map;
  }
  write_plain(folder_ / "model.safetensors.index.json", "{}");
  EXPECT_THROW(load_safetensors(folder_.path().string()), DataError);
  write_plain(folder_ / "model.safetensors.index.json", "{\"weight_map\":");
  EXPECT_THROW(load_safetensors(folder_.path().string()), DataError);
}

}  // namespace
}  // namespace headroom
