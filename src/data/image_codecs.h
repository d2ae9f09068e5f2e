#pragma once

// The decoders behind read_image(). The libraries report errors by longjmp, which stays inside the
// decoders' own files.

#include "data/image_file.h"

#include <string>
#include <string_view>

namespace headroom {

/// The most pixels of an image: what a small file can announce must not take all memory.
inline constexpr std::int64_t kMostPixels = std::int64_t{1} << 28;

/// Decodes a whole file. Returns what is wrong with it; empty: nothing.
std::string decode_jpeg(std::string_view bytes, Pixels& image);
std::string decode_png(std::string_view bytes, Pixels& image);

}  // namespace headroom
