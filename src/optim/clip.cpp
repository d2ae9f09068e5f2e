#include <headroom/optim/optimizer.h>

#include "core/parallel.h"

#include <headroom/core/error.h>
#include "optim/update_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

namespace headroom {
namespace {

// Partial sums are per chunk of fixed size, and added up in the order of the chunks: the result is
// the same for any number of threads.
constexpr std::int64_t kChunk = 1 << 15;

// Squares of doubles overflow from 1e154 on although the gradients are finite; scaled down by a
// power of two they do not.
const double kOverflowScale = std::ldexp(1.0, -600);

/// The values of a gradient as a dense tensor whose memory can be read from front to back. Order
/// does not matter here.
at::Tensor dense_values(const at::Tensor& gradient) {
  if (gradient.is_sparse()) return gradient.coalesce()._values().contiguous();
  return gradient.is_non_overlapping_and_dense() ? gradient : gradient.contiguous();
}

template <typename Scalar>
double sum_of_squares(const Scalar* values, std::int64_t size, double scale) {
  if constexpr (std::is_same_v<Scalar, float>) {
    if (scale == 1.0) return optim_kernels::sum_of_squares(size, values);
  }
  constexpr std::int64_t kLanes = 8;  // independent sums, so that additions overlap
  std::array<double, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(values[i + lane]) * scale;
      sums[lane] += value * value;
    }
  }
  for (; i < size; ++i) {
    const double value = static_cast<double>(values[i]) * scale;
    sums[0] += value * value;
  }
  double sum = 0;
  for (const double lane_sum : sums) sum += lane_sum;
  return sum;
}

double cpu_sum_of_squares(const at::Tensor& values, double scale) {
  const std::int64_t size = values.numel();
  const std::int64_t num_chunks = (size + kChunk - 1) / kChunk;
  std::vector<double> partial(num_chunks, 0.0);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, values.scalar_type(), "headroom::global_norm", [&] {
        const scalar_t* data = values.data_ptr<scalar_t>();
        parallel_for(0, num_chunks, 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t chunk = begin; chunk < end; ++chunk) {
            const std::int64_t start = chunk * kChunk;
            partial[chunk] = sum_of_squares(data + start, std::min(kChunk, size - start), scale);
          }
        });
      });
  double sum = 0;
  for (const double chunk_sum : partial) sum += chunk_sum;
  return sum;
}

double scaled_norm(const std::vector<at::Tensor>& gradients, double scale) {
  double sum = 0;
  at::Tensor device_sum;  // one synchronisation for all gradients that are not on the CPU
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const at::Tensor values = dense_values(gradient);
    if (values.is_cpu()) {
      sum += cpu_sum_of_squares(values, scale);
    } else {
      const at::Tensor squares = (values.to(at::kDouble) * scale).square().sum();
      device_sum = device_sum.defined() ? device_sum + squares.to(device_sum.device()) : squares;
    }
  }
  if (device_sum.defined()) sum += device_sum.item<double>();
  return std::sqrt(sum) / scale;
}

bool all_finite(const at::Tensor& gradient) {
  const at::Tensor values = dense_values(gradient);
  if (!values.is_cpu()) return values.isfinite().all().item<bool>();
  bool finite = true;
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, values.scalar_type(), "headroom::all_finite", [&] {
        const scalar_t* data = values.data_ptr<scalar_t>();
        finite = std::all_of(data, data + values.numel(), [](scalar_t value) {
          return std::isfinite(static_cast<double>(value));
        });
      });
  return finite;
}

}  // namespace

double global_norm(const std::vector<at::Tensor>& gradients) {
  const double norm = scaled_norm(gradients, 1.0);
  return std::isfinite(norm) ? norm : scaled_norm(gradients, kOverflowScale);
}

SquareSum square_sum(const at::Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return {};
  const at::Tensor values = dense_values(gradient);
  const auto sum_at = [&](double scale) {
    return values.is_cpu() ? cpu_sum_of_squares(values, scale)
                           : (values.to(at::kDouble) * scale).square().sum().item<double>();
  };
  const double plain = sum_at(1.0);
  // Squares of smaller types are far from overflowing a double.
  return {plain, values.scalar_type() == at::kDouble ? sum_at(kOverflowScale)
                                                     : plain * kOverflowScale * kOverflowScale};
}

double norm_of(const std::vector<SquareSum>& sums) {
  SquareSum all;
  for (const SquareSum& sum : sums) {
    all.plain += sum.plain;
    all.scaled += sum.scaled;
  }
  const double norm = std::sqrt(all.plain);
  return std::isfinite(norm) ? norm : std::sqrt(all.scaled) / kOverflowScale;
}

double clip_factor(double norm, double max_norm) {
  if (std::isnan(max_norm))
    throw ConfigError("the largest gradient norm (max_grad_norm) is not a number");
  if (max_norm <= 0 || !std::isfinite(norm)) return 1.0;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

double clip_global_norm(const std::vector<at::Tensor>& gradients, double max_norm) {
  const double norm = global_norm(gradients);
  const double factor = clip_factor(norm, max_norm);
  if (factor < 1.0) {
    for (const at::Tensor& gradient : gradients) {
      if (gradient.defined()) gradient.mul_(factor);
    }
  }
  return norm;
}

std::optional<std::string> first_non_finite(
    const std::vector<std::pair<std::string, at::Tensor>>& named_gradients) {
  for (const auto& [name, gradient] : named_gradients) {
    if (gradient.defined() && !all_finite(gradient)) return name;
  }
  return std::nullopt;
}

}  // namespace headroom
