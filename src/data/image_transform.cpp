#include "data/image_transform.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace headroom {
namespace {

constexpr double kPi = 3.14159265358979323846;

double bilinear(double x) {
  x = std::abs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

double sinc(double x) { return x == 0.0 ? 1.0 : std::sin(x * kPi) / (x * kPi); }

double lanczos(double x) { return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

struct FilterRow {
  ResizeFilter filter;
  double (*weight)(double);
  double support;
};
constexpr FilterRow kFilters[] = {{ResizeFilter::kLanczos, lanczos, 3.0},
                                  {ResizeFilter::kBilinear, bilinear, 1.0},
                                  {ResizeFilter::kBicubic, bicubic, 2.0}};

constexpr int kPrecisionBits = 32 - 8 - 2;  // of the weights, as PIL has them

// What one row or column of the result is made of: weights for inputs from `first` on.
struct Window {
  std::int64_t first = 0;
  std::vector<std::int32_t> weights;
};

std::vector<Window> windows_of(std::int64_t in, std::int64_t out, const FilterRow& filter) {
  const double scale = static_cast<double>(in) / static_cast<double>(out),
               stretch = std::max(scale, 1.0), support = filter.support * stretch;
  std::vector<Window> windows(static_cast<std::size_t>(out));
  std::vector<double> weights;
  for (std::int64_t i = 0; i < out; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const auto first = static_cast<std::int64_t>(std::max(center - support + 0.5, 0.0));
    const auto end =
        std::min(static_cast<std::int64_t>(center + support + 0.5), in);  // at least first + 1
    weights.clear();
    double sum = 0.0;
    for (std::int64_t j = first; j < end; ++j) {
      weights.push_back(filter.weight((static_cast<double>(j) - center + 0.5) / stretch));
      sum += weights.back();
    }
    Window& window = windows[static_cast<std::size_t>(i)];
    window.first = first;
    for (const double weight : weights) {
      const double fixed = (sum != 0.0 ? weight / sum : weight) * (1 << kPrecisionBits);
      window.weights.push_back(static_cast<std::int32_t>(fixed < 0 ? fixed - 0.5 : fixed + 0.5));
    }
  }
  return windows;
}

std::uint8_t weighted(const std::uint8_t* in, std::int64_t stride, const Window& window) {
  std::int32_t sum = 1 << (kPrecisionBits - 1);
  for (const std::int32_t weight : window.weights) {
    sum += *in * weight;
    in += stride;
  }
  return static_cast<std::uint8_t>(std::clamp(sum >> kPrecisionBits, 0, 255));
}

Pixels resized_columns(const Pixels& image, std::int64_t columns, const FilterRow& filter) {
  Pixels result{image.rows, columns, image.channels, {}};
  result.values.reserve(static_cast<std::size_t>(result.rows * result.row_bytes()));
  const std::vector<Window> windows = windows_of(image.columns, columns, filter);
  for (std::int64_t row = 0; row < image.rows; ++row) {
    const std::uint8_t* in = image.values.data() + row * image.row_bytes();
    for (const Window& window : windows) {
      for (std::int64_t channel = 0; channel < image.channels; ++channel)
        result.values.push_back(
            weighted(in + window.first * image.channels + channel, image.channels, window));
    }
  }
  return result;
}

Pixels resized_rows(const Pixels& image, std::int64_t rows, const FilterRow& filter) {
  Pixels result{rows, image.columns, image.channels, {}};
  result.values.reserve(static_cast<std::size_t>(result.rows * result.row_bytes()));
  for (const Window& window : windows_of(image.rows, rows, filter)) {
    const std::uint8_t* in = image.values.data() + window.first * image.row_bytes();
    for (std::int64_t i = 0; i < image.row_bytes(); ++i)
      result.values.push_back(weighted(in + i, image.row_bytes(), window));
  }
  return result;
}

Pixels middle_of(const Pixels& image, std::int64_t rows, std::int64_t columns) {
  Pixels result{rows, columns, image.channels, {}};
  const std::int64_t top = (image.rows - rows) / 2, left = (image.columns - columns) / 2;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto first =
        image.values.begin() + (top + row) * image.row_bytes() + left * image.channels;
    result.values.insert(result.values.end(), first, first + result.row_bytes());
  }
  return result;
}

}  // namespace

Pixels resized(const Pixels& image, std::int64_t rows, std::int64_t columns, ResizeFilter kind) {
  const FilterRow& filter = *std::find_if(std::begin(kFilters), std::end(kFilters),
                                          [&](const auto& row) { return row.filter == kind; });
  Pixels result = columns == image.columns ? image : resized_columns(image, columns, filter);
  return rows == image.rows ? result : resized_rows(result, rows, filter);
}

Pixels fitted(Pixels image, const ImageTransform& to) {
  image = with_channels(std::move(image), to.channels);
  if (to.shortest_edge == 0) {
    return image.rows == to.rows && image.columns == to.columns
               ? image
               : resized(image, to.rows, to.columns, to.filter);
  }
  // The longer side is rounded down, as torchvision does.
  const std::int64_t shorter = std::min(image.rows, image.columns), edge = to.shortest_edge;
  const std::int64_t rows = edge * image.rows / shorter, columns = edge * image.columns / shorter;
  return middle_of(resized(image, rows, columns, to.filter), to.rows, to.columns);
}

PixelScale::PixelScale(const ImageTransform& transform) {
  for (std::size_t channel = 0; channel < static_cast<std::size_t>(transform.channels); ++channel) {
    std::array<float, 256>& scaled = by_channel_.emplace_back();
    for (std::size_t value = 0; value < scaled.size(); ++value) {
      // The usual factor is a division, which rounds in the way of other sources of images.
      const auto byte = static_cast<double>(value);
      const double unit = transform.rescale_factor == 1.0 / 255.0
                              ? static_cast<double>(static_cast<float>(value) / 255.0f)
                              : byte * transform.rescale_factor;
      scaled[value] = static_cast<float>(transform.mean.empty() ? unit
                                                                : (unit - transform.mean[channel]) /
                                                                      transform.deviation[channel]);
    }
  }
}

void PixelScale::fill(const std::vector<std::uint8_t>& pixels, float* out) const {
  const std::size_t channels = by_channel_.size(), count = pixels.size() / channels;
  for (std::size_t channel = 0; channel < channels; ++channel) {
    const std::array<float, 256>& scaled = by_channel_[channel];
    const std::uint8_t* in = pixels.data() + channel;
    for (std::size_t i = 0; i < count; ++i, in += channels) *out++ = scaled[*in];
  }
}

}  // namespace headroom
