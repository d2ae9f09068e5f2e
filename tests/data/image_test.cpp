// Image files, and what is made of them for a model.
#include "data/image_file.h"
#include "data/image_transform.h"

#include <headroom/core/error.h>

#include "support/idx_files.h"
#include "support/image_files.h"

#include <gtest/gtest.h>

#include <functional>

namespace headroom {
namespace {

using testing::read_file;
using testing::shaded;
using testing::TemporaryFolder;
using testing::write_plain;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The reference values of these tests are those of PIL 9.4.
Pixels example() {
  Pixels image{5, 7, 1, {}};
  for (int r = 0; r < 5; ++r) {
    for (int c = 0; c < 7; ++c)
      image.values.push_back(static_cast<std::uint8_t>((37 * r * r + 91 * c + 53 * r * c) % 256));
  }
  return image;
}

TEST(Images, AreResizedAsByPil) {
  using Values = std::vector<std::uint8_t>;
  EXPECT_EQ(resized(example(), 3, 4, ResizeFilter::kLanczos).values,
            (Values{70, 130, 134, 150, 101, 90, 160, 88, 84, 138, 60, 51}));
  EXPECT_EQ(resized(example(), 3, 4, ResizeFilter::kBilinear).values,
            (Values{70, 124, 127, 138, 104, 98, 144, 95, 92, 130, 68, 65}));
  EXPECT_EQ(resized(example(), 3, 4, ResizeFilter::kBicubic).values,
            (Values{68, 127, 130, 144, 104, 93, 153, 91, 88, 135, 65, 59}));
  const Values larger = resized(example(), 8, 9, ResizeFilter::kBicubic).values;
  EXPECT_EQ(Values(larger.begin(), larger.begin() + 9),
            (Values{0, 49, 146, 163, 3, 81, 175, 147, 19}));
  EXPECT_EQ(Values(larger.end() - 9, larger.end()),
            (Values{78, 112, 154, 198, 233, 45, 22, 79, 113}));
}

TEST(Images, ColoursBecomeGrayAsByPil) {
  Pixels image{3, 4, 3, {}};
  for (int r = 0; r < 3; ++r) {
    for (int c = 0; c < 4; ++c) {
      for (const int value : {10 * r + c, 200 - 30 * r, c * 77 % 256})
        image.values.push_back(static_cast<std::uint8_t>(value));
    }
  }
  EXPECT_EQ(with_channels(image, 1).values,
            (std::vector<std::uint8_t>{117, 126, 136, 145, 103, 112, 121, 130, 88, 97, 106, 115}));
  const Pixels back = with_channels({1, 2, 1, {7, 9}}, 3);
  EXPECT_EQ(back.values, (std::vector<std::uint8_t>{7, 7, 7, 9, 9, 9}));
}

TEST(Images, ComeBackFromPngAndNearlyFromJpeg) {
  const TemporaryFolder folder;
  for (const std::int64_t channels : {1, 3}) {
    const std::vector<std::uint8_t> values = shaded(16, 24, channels, 40);
    testing::write_png(folder / "a.png", 16, 24, channels, values);
    const Pixels png = read_image(folder / "a.png");
    EXPECT_EQ(png.values, values);
    EXPECT_EQ(png.channels, channels);
    testing::write_jpeg(folder / "a.jpg", 16, 24, channels, values);
    const Pixels jpeg = read_image(folder / "a.jpg");
    ASSERT_EQ(jpeg.values.size(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(jpeg.values[i], values[i], 8) << i;
  }
}

TEST(Images, ThatAreDamagedAreRefusedByName) {
  const TemporaryFolder folder;
  testing::write_png(folder / "good.png", 16, 16, 1, shaded(16, 16, 1, 0));
  testing::write_jpeg(folder / "good.jpg", 64, 64, 3, shaded(64, 64, 3, 0));
  const std::string png = read_file(folder / "good.png"), jpeg = read_file(folder / "good.jpg");
  const auto refused = [&](const std::string& bytes) {
    write_plain(folder / "bad", bytes);
    return error_of([&] { read_image(folder / "bad"); });
  };
  for (std::size_t size = 9; size + 12 < png.size(); size += 7)
    EXPECT_TRUE(contains(refused(png.substr(0, size)), "bad: cannot be decoded as PNG")) << size;
  for (const std::size_t size : {20, 200, 400})
    EXPECT_TRUE(contains(refused(jpeg.substr(0, size)), "bad: cannot be decoded as JPEG")) << size;
  EXPECT_TRUE(contains(refused(jpeg.substr(0, jpeg.size() - 60)), "as JPEG"));
  std::string flipped = png;
  char& of_pixels = flipped[png.find("IDAT") + 8];
  of_pixels = static_cast<char>(~of_pixels);
  EXPECT_TRUE(contains(refused(flipped), "as PNG"));
  EXPECT_TRUE(contains(refused(""), "is empty"));
  EXPECT_TRUE(contains(refused("GIF89a"), "neither a JPEG nor a PNG"));
  EXPECT_TRUE(contains(error_of([&] { read_image(folder / "absent.png"); }), "absent.png"));
  // A header that announces more pixels than there may be.
  std::string huge = png;
  huge.replace(16, 8, std::string("\x00\x0f\xff\xff\x00\x0f\xff\xff", 8));
  EXPECT_TRUE(contains(refused(huge), "as PNG"));
}

TEST(Images, AreFittedByThePreprocessorOfTheModel) {
  const TemporaryFolder folder;
  ModelInput input;
  input.channels = 3;
  input.rows = input.columns = 4;
  input.pixel_mean.assign(3, 0.5);
  input.pixel_deviation.assign(3, 0.25);
  const ImageTransform own = image_transform_of("", input);
  std::vector<float> out(48);
  PixelScale(own).fill(std::vector<std::uint8_t>(48, 255), out.data());
  EXPECT_FLOAT_EQ(out[0], 2.0f);

  write_plain(folder / "preprocessor_config.json",
              R"({"size": {"shortest_edge": 6}, "do_center_crop": true, "resample": 3,
                  "crop_size": {"height": 4, "width": 4}, "image_mean": [0, 0, 0],
                  "image_std": [1, 1, 1]})");
  const ImageTransform clip = image_transform_of(folder.path().string(), input);
  EXPECT_EQ(clip.shortest_edge, 6);
  const Pixels image = fitted({12, 24, 3, shaded(12, 24, 3, 0)}, clip);
  EXPECT_EQ(image.rows, 4);
  EXPECT_EQ(image.columns, 4);
  // What is written is read back.
  write_plain(folder / "preprocessor_config.json", to_preprocessor_config(clip));
  EXPECT_EQ(to_preprocessor_config(image_transform_of(folder.path().string(), input)),
            to_preprocessor_config(clip));

  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {R"({"size": 8})", "makes images of 8 x 8, but the model reads 4 x 4"},
           {R"({"size": 4, "resample": 0})", "resample 0"},
           {R"({"size": 4, "image_mean": [0, 0]})", "2 values for 3 channels"},
           {R"({"size": "big"})", "size"},
           {"[]", "not a JSON object"}}) {
    write_plain(folder / "preprocessor_config.json", text);
    EXPECT_TRUE(
        contains(error_of([&] { image_transform_of(folder.path().string(), input); }), part))
        << text;
  }
}

}  // namespace
}  // namespace headroom
