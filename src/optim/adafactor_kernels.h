#pragma once

#include <cstdint>

namespace headroom::optim_kernels {

/// A tile of a row-major matrix: `rows` rows of `columns` elements, `stride` elements apart.
struct Tile {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
};

/// The sum of squares of contiguous values.
double square_sum(std::int64_t count, const float* values);

/// Adds the squares of the gradient to `row_sums` (one per row) and `column_sums` (one per column).
void add_square_sums(const Tile& tile, const float* gradient, float* row_sums, float* column_sums);

/// What Adafactor does with the update u = gradient / root of the second moment.
struct AdafactorStep {
  float decay;  ///< rate * weight_decay
  float scale;  ///< rate / max(1, rms(u) / clip_threshold)
  float beta1;  ///< of the first moment, where there is one
};

/// The second moment of element (i, j) is row_moments[i] * inverse_row_mean / column_factors[j]^2.
struct FactoredMoment {
  const float* row_moments;
  float inverse_row_mean;
  const float* column_factors;  ///< 1 / sqrt of the column's second moment
};

/// Writes 1 / sqrt(moments[j]).
void inverse_roots(std::int64_t count, const float* moments, float* factors);

/// The sum of squares of u over the tile.
double factored_square_sum(const Tile& tile, const float* gradient, const FactoredMoment& moment);
/// Updates the tile's parameters; `exp_avg` is null without a first moment.
void factored_update(const AdafactorStep& step, const Tile& tile, const FactoredMoment& moment,
                     float* parameter, const float* gradient, float* exp_avg);

/// For parameters with a full second moment: moves it to beta2 * old + (1 - beta2) * (gradient^2 +
/// eps), and returns the sum of squares of u.
double full_square_sum(std::int64_t count, float beta2, float one_minus_beta2, float eps,
                       const float* gradient, float* exp_avg_sq);
void full_update(const AdafactorStep& step, std::int64_t count, float* parameter,
                 const float* gradient, const float* exp_avg_sq, float* exp_avg);

}  // namespace headroom::optim_kernels
