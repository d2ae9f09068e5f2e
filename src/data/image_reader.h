#pragma once

// Image files as tensors, decoded by threads ahead of their use.

#include "data/image_transform.h"
#include "data/read_ahead.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Images by number. Reading is const and safe from several threads.
class ImageReader {
 public:
  ImageReader(std::vector<std::string> paths, ImageTransform transform, std::int64_t num_workers);

  std::int64_t size() const { return static_cast<std::int64_t>(paths_.size()); }
  const ImageTransform& transform() const { return transform_; }

  /// (B, channels, rows, columns). Throws DataError, naming the file, on one that cannot be read.
  at::Tensor load(c10::ArrayRef<std::int64_t> indices) const;
  void expect(c10::ArrayRef<std::int64_t> indices) const;

 private:
  std::vector<std::string> paths_;
  ImageTransform transform_;
  PixelScale scale_;
  mutable ReadAhead ahead_;  // last: its threads use the others
};

}  // namespace headroom
