#pragma once

// Images in files: JPEG and PNG.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// Pixels row by row, the channels of a pixel together.
struct Pixels {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t channels = 0;  ///< 1 is gray, 3 is red, green and blue
  std::vector<std::uint8_t> values;

  std::int64_t row_bytes() const { return columns * channels; }
};

/// Whether a file of this name is taken for an image: .jpg, .jpeg or .png, in any case.
bool is_image_name(std::string_view name);

/// The image of a file, which its first bytes tell to be JPEG or PNG, in gray or colour as the file
/// has it. Palettes are resolved, alpha and the camera's orientation are left alone, 16 bits become
/// 8. Throws DataError, naming the file, on one that is missing, empty, truncated, corrupt, of
/// another format, or larger than 2^28 pixels.
Pixels read_image(const std::string& path);

/// One channel or three: colours become the luminance that PIL's "L" has, gray is repeated.
Pixels with_channels(Pixels image, std::int64_t channels);

}  // namespace headroom
