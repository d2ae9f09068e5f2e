#include "data/image_reader.h"

#include <torch/types.h>

#include <utility>

namespace headroom {

ImageReader::ImageReader(std::vector<std::string> paths, ImageTransform transform,
                         std::int64_t num_workers)
    : paths_(std::move(paths)),
      transform_(std::move(transform)),
      scale_(transform_),
      ahead_(
          [this](std::int64_t index) {
            return fitted(read_image(paths_[static_cast<std::size_t>(index)]), transform_).values;
          },
          num_workers) {}

at::Tensor ImageReader::load(c10::ArrayRef<std::int64_t> indices) const {
  const at::Tensor images = at::empty({static_cast<std::int64_t>(indices.size()),
                                       transform_.channels, transform_.rows, transform_.columns},
                                      at::kFloat);
  auto* out = images.data_ptr<float>();
  for (const std::int64_t index : indices) {
    scale_.fill(ahead_.take(index), out);
    out += transform_.channels * transform_.rows * transform_.columns;
  }
  return images;
}

void ImageReader::expect(c10::ArrayRef<std::int64_t> indices) const {
  ahead_.expect(indices.data(), indices.size());
}

}  // namespace headroom
