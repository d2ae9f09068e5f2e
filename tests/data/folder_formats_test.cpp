// Arrays, folders of images, tables and pairs, as the table of formats opens them.
#include "data/data_format.h"
#include "data/text_samples.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>

#include "support/idx_files.h"
#include "support/image_files.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using Kind = ModelInput::Kind;
using testing::shaded;
using testing::write_plain;

class FolderFormats : public ::testing::Test {
 protected:
  DataRequest request(Kind kind, const std::string& dataset) const {
    DataRequest request;
    request.dataset = folder_ / dataset;
    request.model = "some_model";
    request.input.kind = kind;
    request.input.length = 8;
    request.input.vocabulary = 257;
    request.input.rows = request.input.columns = 8;
    return request;
  }
  std::string error(const DataRequest& request) const {
    try {
      const OpenedData data = open_data(request);
      for (std::int64_t i = 0; i < data.train->size(); ++i) data.train->load({i});
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  // Images of 8 x 8, by class and number.
  void write_image(const std::string& place, int level) const {
    testing::write_png(folder_ / place, 8, 8, 1, shaded(8, 8, 1, level));
  }
  // As numpy.save writes it.
  void write_npy(const std::string& place, const std::string& descr, const std::string& shape,
                 const std::string& bytes) const {
    std::string header =
        "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }";
    header.resize(118, ' ');
    header.back() = '\n';
    const std::string path = folder_ / place;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    write_plain(path,
                std::string("\x93NUMPY\x01\x00", 8) + std::string("\x76\x00", 2) + header + bytes);
  }
  template <typename T>
  static std::string bytes_of(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
  }

  testing::TemporaryFolder folder_;
};

TEST_F(FolderFormats, ClassFoldersBecomeImagesWithNamedClasses) {
  for (int i = 0; i < 3; ++i) {
    write_image("set/train/dog/" + std::to_string(i) + ".png", 10 * i);
    write_image("set/train/cat/" + std::to_string(i) + ".PNG", 100 + i);
  }
  write_image("set/val/dog/0.png", 7);
  write_plain(folder_ / "set/train/dog/notes.txt", "no image");
  const OpenedData data = open_data(request(Kind::kImages, "set"));
  EXPECT_EQ(data.labels, (LabelNames{"cat", "dog"}));
  EXPECT_EQ(data.train->size(), 6);
  EXPECT_EQ(data.eval->size(), 1);
  const MicroBatch batch = data.train->load({3, 0});
  EXPECT_EQ(batch.targets[0][0].item<int>(), 1);
  EXPECT_EQ(batch.targets[0][1].item<int>(), 0);
  EXPECT_FLOAT_EQ(batch.inputs[0][0][0][2][1].item<float>(), 3 / 255.0f);
  EXPECT_FLOAT_EQ(batch.inputs[0][1][0][0][0].item<float>(), 100 / 255.0f);
  ASSERT_EQ(data.files.size(), 1U);
  EXPECT_EQ(data.files[0].first, "preprocessor_config.json");
}

TEST_F(FolderFormats, AnImageFolderHoldsWhatAnIdxFolderHolds) {
  // Two images of 28 x 28 with the labels 0 and 1, in both forms.
  std::string images = testing::idx_images(2), labels = testing::idx_header({2});
  labels += std::string("\x00\x01", 2);
  std::filesystem::create_directories(folder_ / "idx");
  for (const char* part : {"train", "t10k"}) {
    write_plain(folder_ / "idx/" + part + "-images-idx3-ubyte", images);
    write_plain(folder_ / "idx/" + part + "-labels-idx1-ubyte", labels);
  }
  for (const std::size_t i : {0, 1}) {
    const std::string pixels = images.substr(16 + i * 784, 784);
    testing::write_png(folder_ / ("png/train/" + std::to_string(i) + "/x.png"), 28, 28, 1,
                       {pixels.begin(), pixels.end()});
  }
  DataRequest idx = request(Kind::kImages, "idx"), png = request(Kind::kImages, "png");
  idx.input.rows = idx.input.columns = png.input.rows = png.input.columns = 28;
  const MicroBatch a = open_data(idx).train->load({0, 1}), b = open_data(png).train->load({0, 1});
  EXPECT_TRUE(torch::equal(a.inputs[0], b.inputs[0]));
  EXPECT_TRUE(torch::equal(a.targets[0], b.targets[0]));
}

TEST_F(FolderFormats, WorkersChangeNothingButTheTime) {
  for (int i = 0; i < 40; ++i)
    write_image("set/" + std::string(i % 2 == 0 ? "a" : "b") + "/" + std::to_string(i) + ".png", i);
  DataRequest alone = request(Kind::kImages, "set"), helped = alone;
  helped.num_workers = 3;
  const OpenedData a = open_data(alone), b = open_data(helped);
  EXPECT_EQ(a.train->size(), 36) << "a tenth is held out";
  ASSERT_EQ(b.eval->size(), 4);
  std::vector<std::int64_t> order;
  for (std::int64_t i = 0; i < 36; ++i) order.push_back((i * 7) % 36);
  b.train->expect(order);
  for (std::size_t i = 0; i < order.size(); i += 6) {
    const std::vector<std::int64_t> part(order.begin() + static_cast<std::ptrdiff_t>(i),
                                         order.begin() + static_cast<std::ptrdiff_t>(i + 6));
    const MicroBatch x = a.train->load(part), y = b.train->load(part);
    EXPECT_TRUE(torch::equal(x.inputs[0], y.inputs[0]));
    EXPECT_TRUE(torch::equal(x.targets[0], y.targets[0]));
  }
}

TEST_F(FolderFormats, WhatIsWrongWithImagesIsNamed) {
  write_image("set/train/a/0.png", 1);
  write_plain(folder_ / "set/train/a/1.png", "");
  EXPECT_NE(error(request(Kind::kImages, "set")).find("a/1.png: is empty"), std::string::npos);
  write_image("set/train/a/1.png", 1);
  write_image("set/val/b/0.png", 1);
  EXPECT_NE(error(request(Kind::kImages, "set")).find("the class 'b' is none of"),
            std::string::npos);
  std::filesystem::remove_all(folder_ / "set/val");
  std::filesystem::create_directories(folder_ / "set/train/c");
  EXPECT_NE(error(request(Kind::kImages, "set")).find("train/c: the class has no image"),
            std::string::npos);
  std::filesystem::remove_all(folder_ / "set/train/c");
  DataRequest evaluated = request(Kind::kImages, "set");
  evaluated.labels = {"x", "y"};
  evaluated.is_trained = false;
  EXPECT_NE(error(evaluated).find("the class 'a' is none of the model's"), std::string::npos);
}

TEST_F(FolderFormats, ArraysAreReadWhereTheyLie) {
  std::vector<float> pixels(2 * 64);
  for (std::size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<float>(i) / 8;
  write_npy("set/inputs.npy", "<f4", "(2, 1, 8, 8)", bytes_of(pixels));
  write_npy("set/targets.npy", "<i4", "(2,)", bytes_of(std::vector<std::int32_t>{3, 1}));
  const OpenedData data = open_data(request(Kind::kImages, "set"));
  const MicroBatch batch = data.train->load({1, 0});
  EXPECT_EQ(batch.targets[0][0].item<std::int64_t>(), 1);
  EXPECT_EQ(batch.targets[0].scalar_type(), torch::kLong);
  EXPECT_FLOAT_EQ(batch.inputs[0][0][0][0][1].item<float>(), 65.0f / 8);
  EXPECT_EQ(batch.num_items, 2);

  // Bytes of images are in [0, 1].
  write_npy("set/inputs.npy", "|u1", "(2, 1, 8, 8)", std::string(128, '\xff'));
  EXPECT_FLOAT_EQ(
      open_data(request(Kind::kImages, "set")).train->load({0}).inputs[0].sum().item<float>(),
      64.0f);

  // Several inputs, and targets of which some count for nothing.
  write_npy("tokens/inputs_0.npy", "<i8", "(1, 3)", bytes_of(std::vector<std::int64_t>{1, 2, 3}));
  write_npy("tokens/inputs_1.npy", "|b1", "(1, 3)", std::string("\x01\x01\x00", 3));
  write_npy("tokens/targets.npy", "<i8", "(1, 3)",
            bytes_of(std::vector<std::int64_t>{5, -100, 256}));
  const OpenedData tokens = open_data(request(Kind::kTokens, "tokens"));
  EXPECT_EQ(tokens.train->count_items({0}), 2);
  const MicroBatch rows = tokens.train->load({0});
  EXPECT_EQ(rows.inputs.size(), 2U);
  EXPECT_EQ(rows.inputs[1].scalar_type(), torch::kBool);
  EXPECT_EQ(rows.num_items, 2);
}

TEST_F(FolderFormats, WhatIsWrongWithArraysIsNamed) {
  const std::string pixels = bytes_of(std::vector<float>(128));
  const auto message = [&](const std::string& descr, const std::string& shape,
                           const std::string& bytes, const std::string& target_shape,
                           const std::vector<std::int64_t>& targets) {
    write_npy("set/inputs.npy", descr, shape, bytes);
    write_npy("set/targets.npy", "<i8", target_shape, bytes_of(targets));
    return error(request(Kind::kImages, "set"));
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text << "\nexpected " << part;
  };
  expect(message("<f4", "(2, 1, 8, 8)", pixels, "(2,)", {0, 11}),
         "targets has the class 11 in row 1, but the model knows 0 to 9");
  expect(message("<f4", "(2, 1, 8, 8)", pixels, "(3,)", {0, 1, 2}), "targets holds 3 samples");
  expect(message("<f4", "(2, 1, 4, 16)", pixels, "(2,)", {0, 1}), "reads (samples, 1, 8, 8)");
  expect(message("<f4", "(3, 1, 8, 8)", pixels, "(3,)", {0, 1, 2}), "more than the file");
  expect(message(">f4", "(2, 1, 8, 8)", pixels, "(2,)", {0, 1}), "type '>f4'");
  expect(message("<f4", "(0, 1, 8, 8)", "", "(0,)", {}), "holds no sample");
  write_plain(folder_ / "set/inputs.npy", "not numpy at all");
  expect(error(request(Kind::kImages, "set")), "is no .npy file");
  write_npy("set/inputs.npy", "<f4", "(2, 1, 8, 8)", pixels);
  std::filesystem::remove(folder_ / "set/targets.npy");
  expect(error(request(Kind::kImages, "set")), "has no targets");
}

TEST_F(FolderFormats, ArraysOfTextsNeedNeitherMaskNorPlaces) {
  using Numbers = std::vector<std::int64_t>;
  write_npy("set/inputs.npy", "<i8", "(2, 3)", bytes_of(Numbers{1, 2, 3, 4, 0, 0}));
  write_npy("set/targets.npy", "<i8", "(2,)", bytes_of(Numbers{1, 0}));
  DataRequest texts = request(Kind::kTexts, "set");
  const auto places = [&] { return open_data(texts).train->load({0, 1}).targets.at(1); };
  EXPECT_TRUE(torch::equal(places(), torch::tensor({{2}, {2}}, torch::kLong)));
  std::filesystem::rename(folder_ / "set/inputs.npy", folder_ / "set/inputs_0.npy");
  write_npy("set/inputs_1.npy", "<i8", "(2, 3)", bytes_of(Numbers{1, 1, 1, 1, 0, 0}));
  EXPECT_TRUE(torch::equal(places(), torch::tensor({{2}, {0}}, torch::kLong)));
  EXPECT_EQ(open_data(texts).train->load({0}).inputs.at(1).scalar_type(), torch::kBool);
  texts.input.sees_all_tokens = true;
  EXPECT_TRUE(torch::equal(places(), torch::zeros({2, 1}, torch::kLong)));
  const auto expect_error = [&](const std::string& part) {
    EXPECT_NE(error(texts).find(part), std::string::npos) << error(texts);
  };
  write_npy("set/inputs_0.npy", "<i8", "(2, 3)", bytes_of(Numbers{1, 2, 3, 4, 257, 0}));
  expect_error("inputs_0 has the token 257 in row 1, but the model knows 0 to 256");
  write_npy("set/inputs_0.npy", "<i8", "(2, 3)", bytes_of(Numbers{1, 2, 3, -100, 0, 0}));
  expect_error("has the token -100 in row 1");
  write_npy("set/inputs_0.npy", "<f8", "(2, 3)", bytes_of(std::vector<double>(6)));
  expect_error("is of Double, but the number of a token is whole");
  write_npy("set/inputs_0.npy", "<i8", "(2, 9)", bytes_of(Numbers(18)));
  expect_error("reads (samples, tokens), of which at most 8");
  write_npy("set/inputs_0.npy", "<i8", "(2, 2)", bytes_of(Numbers(4)));
  expect_error("inputs_1 is (2, 3), but model some_model reads (samples, 2)");
}

TEST_F(FolderFormats, TextsWithClassesArePaddedByMicroBatch) {
  write_plain(folder_ / "a.csv", "text,label\nabc,good\na,bad\nabcdefghijkl,good\n");
  DataRequest texts = request(Kind::kTexts, "a.csv");
  const OpenedData causal = open_data(texts);
  EXPECT_EQ(causal.labels, (LabelNames{"bad", "good"}));
  const MicroBatch batch = causal.train->load({0, 1});
  EXPECT_EQ(batch.inputs.size(), 1U);
  EXPECT_EQ(batch.inputs[0].sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_TRUE(torch::equal(batch.targets[0], torch::tensor({1, 0}, torch::kLong)));
  EXPECT_TRUE(torch::equal(batch.targets[1], torch::tensor({{2}, {0}}, torch::kLong)))
      << "each text's last token";
  EXPECT_EQ(causal.train->load({2}).inputs[0].size(1), 8) << "longer texts are cut";
  texts.input.sees_all_tokens = true;
  const MicroBatch seen = open_data(texts).train->load({0, 1});
  ASSERT_EQ(seen.inputs.size(), 2U);
  EXPECT_TRUE(
      torch::equal(seen.inputs[1], torch::tensor({{true, true, true}, {true, false, false}})));
  EXPECT_TRUE(torch::equal(seen.targets[1], torch::zeros({2, 1}, torch::kLong)));
}

TEST_F(FolderFormats, DocumentsArePaddedOrPackedAndEveryTokenIsGuessedOnce) {
  write_plain(folder_ / "a.jsonl",
              "{\"text\": \"abc\"}\n{\"text\": \"defghijklmno\"}\n{\"text\": \"p\"}\n"
              "{\"text\": \"qr\"}\n");
  DataRequest documents = request(Kind::kTokens, "a.jsonl");
  const OpenedData padded = open_data(documents);
  // 3, 12 in pieces of 9 and 4, and 2 tokens; one token alone has no next one.
  ASSERT_EQ(padded.train->size(), 4);
  const std::vector<std::int64_t> all = {0, 1, 2, 3};
  EXPECT_EQ(padded.train->count_items(all), 2 + 8 + 3 + 1);
  const MicroBatch rows = padded.train->load(all);
  EXPECT_EQ(rows.num_items, 14);
  EXPECT_EQ(rows.inputs[0].sizes(), (std::vector<std::int64_t>{4, 8}));
  EXPECT_EQ(rows.targets[0].eq(kIgnoreIndex).sum().item<std::int64_t>(), 32 - 14);
  EXPECT_EQ(rows.targets[0][1][7].item<std::int64_t>(), 'l');
  EXPECT_EQ(rows.inputs[0][2][0].item<std::int64_t>(), 'l')
      << "the second piece goes on from there";

  documents.packs = true;
  const OpenedData packed = open_data(documents);
  ASSERT_EQ(packed.train->size(), 2);
  EXPECT_EQ(packed.train->count_items({0, 1}), 14);
  const MicroBatch two = packed.train->load({0, 1});
  EXPECT_EQ(two.inputs.size(), 3U);
  EXPECT_EQ(two.inputs[0].sizes(), (std::vector<std::int64_t>{2, 8}));
  EXPECT_TRUE(torch::equal(two.inputs[1][1], torch::tensor({0, 0, 0, 3, 3, 5, 6, 6}, torch::kInt)));
  EXPECT_TRUE(
      torch::equal(two.inputs[2][1], torch::tensor({0, 1, 2, 0, 1, 0, 0, 0}, torch::kLong)));
}

TEST_F(FolderFormats, PairsAreImagesWithTheTextBesideThem) {
  for (int i = 0; i < 3; ++i) {
    write_image("set/" + std::to_string(i) + ".png", i);
    write_plain(folder_ / ("set/" + std::to_string(i) + ".txt"), std::string(i + 1, 'x'));
  }
  const OpenedData data = open_data(request(Kind::kPairs, "set"));
  const MicroBatch batch = data.train->load({0, 2});
  ASSERT_EQ(batch.inputs.size(), 3U);
  EXPECT_EQ(batch.inputs[1].sizes(), (std::vector<std::int64_t>{2, 4}));
  EXPECT_TRUE(torch::equal(batch.inputs[2], torch::tensor({{1}, {3}}, torch::kLong)));
  EXPECT_EQ(batch.inputs[1][0][1].item<std::int64_t>(), 256) << "the end of the text";
  write_plain(
      folder_ / "set/list.jsonl",
      "{\"image\": \"1.png\", \"text\": \"yy\"}\n{\"image\": \"0.png\", \"text\": \"z\"}\n");
  const OpenedData listed = open_data(request(Kind::kPairs, "set/list.jsonl"));
  EXPECT_TRUE(torch::equal(listed.train->load({1}).inputs[0], data.train->load({0}).inputs[0]));
  write_plain(folder_ / "set/list.jsonl", "{\"image\": \"9.png\", \"text\": \"yy\"}\n");
  EXPECT_NE(error(request(Kind::kPairs, "set/list.jsonl")).find("row 1: there is no image"),
            std::string::npos);
  std::filesystem::remove(folder_ / "set/1.txt");
  EXPECT_NE(error(request(Kind::kPairs, "set")).find("1.png: has no text beside it"),
            std::string::npos);
}

}  // namespace
}  // namespace headroom
