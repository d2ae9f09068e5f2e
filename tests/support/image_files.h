#pragma once

// Small JPEG and PNG files for tests.

#include <png.h>

#include <cstdio>

// In this order: the library's header needs FILE.
#include <jpeglib.h>

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace headroom::testing {

/// 8 bits per channel: gray (1) or red, green and blue (3), row by row.
inline void write_png(const std::string& path, std::int64_t rows, std::int64_t columns,
                      std::int64_t channels, const std::vector<std::uint8_t>& values) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(columns);
  image.height = static_cast<png_uint_32>(rows);
  image.format = channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY;
  if (png_image_write_to_file(&image, path.c_str(), 0, values.data(), 0, nullptr) == 0)
    throw std::runtime_error(image.message);
}

inline void write_jpeg(const std::string& path, std::int64_t rows, std::int64_t columns,
                       std::int64_t channels, const std::vector<std::uint8_t>& values) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) throw std::runtime_error("cannot write " + path);
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  jpeg_stdio_dest(&info, file);
  info.image_width = static_cast<JDIMENSION>(columns);
  info.image_height = static_cast<JDIMENSION>(rows);
  info.input_components = static_cast<int>(channels);
  info.in_color_space = channels == 3 ? JCS_RGB : JCS_GRAYSCALE;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 95, TRUE);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    auto* row = const_cast<JSAMPROW>(values.data() + static_cast<std::int64_t>(info.next_scanline) *
                                                         columns * channels);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::fclose(file);
}

/// A smooth image whose mean brightness is about `level`.
inline std::vector<std::uint8_t> shaded(std::int64_t rows, std::int64_t columns,
                                        std::int64_t channels, int level) {
  std::vector<std::uint8_t> values;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      for (std::int64_t channel = 0; channel < channels; ++channel)
        values.push_back(static_cast<std::uint8_t>((level + r + c + 3 * channel) & 0xff));
    }
  }
  return values;
}

}  // namespace headroom::testing
