#pragma once

// From the pixels of a file to what a model reads: size, crop, scale and normal form.

#include <headroom/core/micro_batch.h>
#include "data/image_file.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// As PIL has them, antialiased.
enum class ResizeFilter : int { kLanczos = 1, kBilinear = 2, kBicubic = 3 };

/// The image at another size, bit by bit as PIL's resize gives it.
Pixels resized(const Pixels& image, std::int64_t rows, std::int64_t columns, ResizeFilter filter);

/// The steps of a preprocessor_config.json, in their order.
struct ImageTransform {
  std::int64_t channels = 1, rows = 28, columns = 28;  ///< of what comes out
  /// Above 0: the shorter side is resized to this, and the middle is cut out. Otherwise rows and
  /// columns are resized to what comes out.
  std::int64_t shortest_edge = 0;
  ResizeFilter filter = ResizeFilter::kBilinear;
  double rescale_factor = 1.0 / 255.0;
  std::vector<double> mean, deviation;  ///< by channel; empty: 0 and 1
};

/// The transform that a model's folder says in its preprocessor_config.json, or else what its
/// family takes. Throws DataError on a file that cannot be read, and ConfigError on a step that
/// cannot be served or gives another size than the model reads.
ImageTransform image_transform_of(const std::string& model_folder, const ModelInput& input);

/// preprocessor_config.json of a transform, as Hugging Face's ViTImageProcessor and
/// CLIPImageProcessor read it.
std::string to_preprocessor_config(const ImageTransform& transform);

/// Pixels of exactly what comes out, not yet scaled.
Pixels fitted(Pixels image, const ImageTransform& transform);

/// The values that a model reads of each byte of a channel.
class PixelScale {
 public:
  explicit PixelScale(const ImageTransform& transform);
  /// Fills (channels, rows, columns) from fitted pixels.
  void fill(const std::vector<std::uint8_t>& pixels, float* out) const;

 private:
  std::vector<std::array<float, 256>> by_channel_;
};

}  // namespace headroom
