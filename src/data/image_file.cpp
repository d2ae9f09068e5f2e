#include "data/image_file.h"

#include "core/input_file.h"
#include "core/text.h"
#include "data/image_codecs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace headroom {
namespace {

constexpr std::string_view kJpegStart = "\xff\xd8\xff", kPngStart = "\x89PNG\r\n\x1a\n";
constexpr std::int64_t kMostFileBytes = std::int64_t{1} << 30;

}  // namespace

bool is_image_name(std::string_view name) {
  std::string lower(name.substr(name.size() - std::min<std::size_t>(name.size(), 5)));
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return ends_with(lower, ".jpg") || ends_with(lower, ".jpeg") || ends_with(lower, ".png");
}

Pixels read_image(const std::string& path) {
  const InputFile file(path);
  if (file.size() == 0) file.fail("is empty: no image");
  const std::string bytes = file.read_all(kMostFileBytes);
  const bool is_jpeg = starts_with(bytes, kJpegStart);
  if (!is_jpeg && !starts_with(bytes, kPngStart)) file.fail("is neither a JPEG nor a PNG file");
  Pixels image;
  const std::string wrong = is_jpeg ? decode_jpeg(bytes, image) : decode_png(bytes, image);
  if (!wrong.empty())
    file.fail(fmt::format("cannot be decoded as {}: {}", is_jpeg ? "JPEG" : "PNG", wrong));
  if (image.values.empty()) file.fail("holds an image without pixels");
  return image;
}

Pixels with_channels(Pixels image, std::int64_t channels) {
  if (image.channels == channels) return image;
  Pixels result{image.rows, image.columns, channels, {}};
  result.values.resize(static_cast<std::size_t>(result.rows * result.row_bytes()));
  const std::uint8_t* in = image.values.data();
  for (std::size_t i = 0; i < result.values.size();) {
    if (channels == 3) {
      for (int channel = 0; channel < 3; ++channel) result.values[i++] = *in;
      ++in;
    } else {
      constexpr std::uint32_t kRed = 19595, kGreen = 38470, kBlue = 7471, kHalf = 0x8000;
      result.values[i++] =
          static_cast<std::uint8_t>((in[0] * kRed + in[1] * kGreen + in[2] * kBlue + kHalf) >> 16);
      in += 3;
    }
  }
  return result;
}

}  // namespace headroom
