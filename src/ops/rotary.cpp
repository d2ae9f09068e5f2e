#include "ops/rotary.h"

#include "core/parallel.h"

#include <ATen/ATen.h>

#include <cmath>

namespace headroom::ops {

std::vector<float> rotary_frequencies(const RotaryOptions& options, std::int64_t head_size) {
  std::vector<float> frequencies;
  for (std::int64_t j = 0; j < head_size / 2; ++j) {
    double frequency =
        std::pow(options.theta, -2.0 * static_cast<double>(j) / static_cast<double>(head_size));
    if (options.scaling) {
      const RotaryScaling& scaling = *options.scaling;
      const double turns = frequency * static_cast<double>(scaling.original_length) / (2.0 * M_PI);
      // 0 where a whole turn is longer than the original text, 1 where it is short.
      const double kept = (turns - scaling.low_frequency_factor) /
                          (scaling.high_frequency_factor - scaling.low_frequency_factor);
      const double share = std::fmin(1.0, std::fmax(0.0, kept));
      frequency *= share + (1.0 - share) / scaling.factor;
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

namespace {

// The C library's functions element by element: vectorised ones may round the last elements of a
// thread's share differently.
template <class Number>
void fill(const std::vector<float>& frequencies, std::int64_t first, const at::Tensor& table) {
  const std::int64_t length = table.size(1), half = table.size(2);
  auto* cosines = table.data_ptr<Number>();
  Number* sines = cosines + length * half;
  parallel_for(0, length, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t j = 0; j < half; ++j) {
        const float angle =
            static_cast<float>(first + t) * frequencies[static_cast<std::size_t>(j)];
        cosines[t * half + j] = std::cos(static_cast<Number>(angle));
        sines[t * half + j] = std::sin(static_cast<Number>(angle));
      }
    }
  });
}

}  // namespace

at::Tensor rotary_table(const RotaryOptions& options, std::int64_t first, std::int64_t length,
                        std::int64_t head_size, const at::Tensor& like) {
  const bool is_double = like.scalar_type() == at::kDouble;
  const at::Tensor table =
      at::empty({2, length, head_size / 2}, at::TensorOptions()
                                                .dtype(is_double ? at::kDouble : at::kFloat)
                                                .device(like.is_meta() ? at::kMeta : at::kCPU));
  if (like.is_meta()) return table;
  const std::vector<float> frequencies = rotary_frequencies(options, head_size);
  if (is_double) {
    fill<double>(frequencies, first, table);
  } else {
    fill<float>(frequencies, first, table);
  }
  return table;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& table) {
  const std::int64_t half = x.size(-1) / 2;
  const at::Tensor turned = table.to(x.device(), x.scalar_type());
  const at::Tensor cosines = turned[0], sines = turned[1];
  const at::Tensor low = x.narrow(-1, 0, half), high = x.narrow(-1, half, half);
  return at::cat({low * cosines - high * sines, high * cosines + low * sines}, -1);
}

}  // namespace headroom::ops
