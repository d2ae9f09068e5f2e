#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/few_rows_kernels.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#include <algorithm>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {

// Accumulators of a tile are kTile by up to two vectors: as many as there are registers.
constexpr int kTile = HWY_TARGET <= HWY_AVX3 ? 12 : 6;
// Of x, this many numbers are turned at once, on the stack.
constexpr std::int64_t kTurned = 16384;
// A sum over columns of x is made in parts of this length.
constexpr std::int64_t kPart = 256;
// Longer sums over columns of dy are made in parts of this length, whose rows of dy stay in the
// nearest cache.
constexpr std::int64_t kMostDepth = 512;
static_assert(kMostDepth >= kernels::kMostFewRows, "a gradient of weights is one part");

HWY_INLINE std::int64_t Lanes() { return static_cast<std::int64_t>(hn::Lanes(DF())); }

// ---- y = x w^T. Lanes are rows of x, which is turned for that; each number of w is read once per
// group of rows, from where it lies.

// turned[k * padded + i] = x[i][first + k]; 0 for rows beyond the last.
HWY_INLINE void Turn(const float* x, std::int64_t rows, std::int64_t padded, std::int64_t in,
                     std::int64_t first, std::int64_t depth, float* HWY_RESTRICT turned) {
  std::int64_t row = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> dd;
  for (; row + 4 <= rows; row += 4) {
    const float* from = x + row * in + first;
    float* to = turned + row;
    std::int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      const auto r0 = hn::LoadU(d, from + k), r1 = hn::LoadU(d, from + in + k);
      const auto r2 = hn::LoadU(d, from + 2 * in + k), r3 = hn::LoadU(d, from + 3 * in + k);
      const auto a = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1)),
                 b = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
      const auto e = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1)),
                 f = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, a, b)), d, to + k * padded);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, a, b)), d, to + (k + 1) * padded);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, e, f)), d, to + (k + 2) * padded);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, e, f)), d, to + (k + 3) * padded);
    }
    for (; k < depth; ++k) {
      for (std::int64_t i = 0; i < 4; ++i) to[k * padded + i] = from[i * in + k];
    }
  }
#endif
  for (; row < padded; ++row) {
    for (std::int64_t k = 0; k < depth; ++k)
      turned[k * padded + row] = row < rows ? x[row * in + first + k] : 0.0f;
  }
}

// sums[j][lane] (+)= the sum over k < depth of w[j][k] * turned[k][lane].
template <int kVectors, class D>
HWY_INLINE void MultiplyTurned(D d, const float* const* w, std::int64_t depth,
                               const float* HWY_RESTRICT turned, std::int64_t padded,
                               float* HWY_RESTRICT sums, bool accumulate) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  hn::Vec<D> acc[kTile][kVectors];
  const float* rows[kTile];
#pragma GCC unroll 12
  for (int j = 0; j < kTile; ++j) {
    rows[j] = w[j];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[j][v] = hn::Zero(d);
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    hn::Vec<D> x[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) x[v] = hn::LoadU(d, turned + k * padded + v * lanes);
#pragma GCC unroll 12
    for (int j = 0; j < kTile; ++j) {
      const hn::Vec<D> value = hn::Set(d, rows[j][k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) acc[j][v] = hn::MulAdd(value, x[v], acc[j][v]);
    }
  }
#pragma GCC unroll 12
  for (int j = 0; j < kTile; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + j * padded + v * lanes;
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to), acc[j][v]) : acc[j][v], d, to);
    }
  }
}

// The same for all rows of x, in parts: a sum of few terms, and then of few sums, is rounded less
// than one of many.
template <class D>
HWY_INLINE void MultiplyAllTurned(D d, const float* const* w, std::int64_t depth,
                                  const float* turned, std::int64_t padded, float* sums) {
  const std::int64_t pair = 2 * static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t first = 0; first < depth; first += kPart) {
    const std::int64_t count = std::min(kPart, depth - first);
    const float* rows[kTile];
    for (int j = 0; j < kTile; ++j) rows[j] = w[j] + first;
    const float* part = turned + first * padded;
    std::int64_t row = 0;
    for (; row + pair <= padded; row += pair)
      MultiplyTurned<2>(d, rows, count, part + row, padded, sums + row, first > 0);
    if (row < padded) MultiplyTurned<1>(d, rows, count, part + row, padded, sums + row, first > 0);
  }
}

struct Finish {
  const float* bias;  // optional
  bool starts;        // y is not there yet
  bool ends, relu;
};

// y[i][j] (+)= sums[j][i] for `count` columns.
HWY_INLINE void AddTurned(const float* sums, std::int64_t padded, std::int64_t rows,
                          std::int64_t count, const Finish& finish, float* y, std::int64_t out) {
  for (std::int64_t i = 0; i < rows; ++i) {
    float* row = y + i * out;
    for (std::int64_t j = 0; j < count; ++j) {
      const float before = !finish.starts ? row[j] : finish.bias != nullptr ? finish.bias[j] : 0.0f;
      const float sum = before + sums[j * padded + i];
      row[j] = finish.ends && finish.relu && sum < 0.0f ? 0.0f : sum;
    }
  }
}

template <class D>
void FewRowsForwardBy(D d, const float* x, const float* w, const float* bias, bool relu, float* y,
                      std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                      std::int64_t end) {
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t padded = (rows + lanes - 1) / lanes * lanes;
  HWY_ALIGN float turned[kTurned];
  HWY_ALIGN float sums[kTile * kernels::kMostFewRows];
  const std::int64_t most_depth = kTurned / (rows <= 16 ? 16 : rows <= 32 ? 32 : 64);
  std::int64_t first = 0;
  do {
    const std::int64_t depth = std::min(most_depth, in - first);
    Turn(x, rows, padded, in, first, depth, turned);
    for (std::int64_t column = begin; column < end; column += kTile) {
      const std::int64_t count = std::min<std::int64_t>(kTile, end - column);
      const float* tile[kTile];
      for (std::int64_t j = 0; j < kTile; ++j)
        tile[j] = w + (column + std::min(j, count - 1)) * in + first;
      MultiplyAllTurned(d, tile, depth, turned, padded, sums);
      const Finish finish{bias == nullptr ? nullptr : bias + column, first == 0,
                          first + depth == in, relu};
      AddTurned(sums, padded, rows, count, finish, y + column, out);
    }
    first += depth;
  } while (first < in);
}

void FewRowsForward(const float* x, const float* w, const float* bias, bool relu, float* y,
                    std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                    std::int64_t end) {
  // Half a vector does for the fewest rows.
  if (rows <= 8)
    return FewRowsForwardBy(hn::CappedTag<float, 8>(), x, w, bias, relu, y, rows, in, out, begin,
                            end);
  FewRowsForwardBy(DF(), x, w, bias, relu, y, rows, in, out, begin, end);
}

// ---- Gradients. Lanes are columns of x and w, which are read from where they lie.

// A product c (+)= a b. a(i, k) is at a[i * row_step + k * step]; rows of b and c are ldb and ldc
// apart.
struct Product {
  const float* a;
  std::int64_t row_step, step;
  const float* b;
  std::int64_t ldb;
  float* c;
  std::int64_t ldc;
  std::int64_t depth;
  bool accumulate;

  Product at_column(std::int64_t column) const {
    Product product = *this;
    product.b += column;
    product.c += column;
    return product;
  }
};

// For the first kVectors vectors of columns and kRows rows. What is added to is read last, so that
// the sum of the product is not rounded to its size in between.
template <int kRows, int kVectors>
HWY_INLINE void MultiplyStrip(const Product& product) {
  const DF d;
  const std::int64_t lanes = Lanes();
  const std::int64_t depth = product.depth, row_step = product.row_step, ldb = product.ldb;
  const float* HWY_RESTRICT a = product.a;
  const float* HWY_RESTRICT b = product.b;
  VF acc[kRows][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) acc[i][v] = hn::Zero(d);
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    VF right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      right[v] = hn::LoadU(d, b + k * ldb + v * lanes);
      // Rows are too far apart for the hardware to see what comes.
      hwy::Prefetch(b + std::min(k + 8, depth - 1) * ldb + v * lanes);
    }
    const float* column = a + k * product.step;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const VF value = hn::Set(d, column[i * row_step]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) acc[i][v] = hn::MulAdd(value, right[v], acc[i][v]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = product.c + i * product.ldc + v * lanes;
      hn::StoreU(product.accumulate ? hn::Add(hn::LoadU(d, to), acc[i][v]) : acc[i][v], d, to);
    }
  }
}

template <int kRows, int kVectors>
HWY_NOINLINE void MultiplyStripUpTo(int rows, const Product& product) {
  if (rows == kRows) {
    MultiplyStrip<kRows, kVectors>(product);
  } else if constexpr (kRows > 1) {
    MultiplyStripUpTo<kRows - 1, kVectors>(rows, product);
  }
}

// The first `width` columns, fewer than a vector, through copies.
HWY_NOINLINE void MultiplyRest(int rows, std::int64_t width, const Product& product) {
  constexpr std::int64_t kStride = 16;
  HWY_ALIGN float right[kMostDepth * kStride];
  HWY_ALIGN float sums[kTile * kStride];
  for (std::int64_t k = 0; k < product.depth; ++k) {
    for (std::int64_t j = 0; j < kStride; ++j)
      right[k * kStride + j] = j < width ? product.b[k * product.ldb + j] : 0.0f;
  }
  Product whole = product;
  whole.b = right;
  whole.ldb = kStride;
  whole.c = sums;
  whole.ldc = kStride;
  whole.accumulate = false;
  MultiplyStripUpTo<kTile, 1>(rows, whole);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      float& to = product.c[i * product.ldc + j];
      to = (product.accumulate ? to : 0.0f) + sums[i * kStride + j];
    }
  }
}

HWY_INLINE void MultiplyColumns(int rows, std::int64_t columns, const Product& product) {
  const std::int64_t lanes = Lanes();
  std::int64_t j = 0;
  for (; j + 2 * lanes <= columns; j += 2 * lanes)
    MultiplyStripUpTo<kTile, 2>(rows, product.at_column(j));
  for (; j + lanes <= columns; j += lanes) MultiplyStripUpTo<kTile, 1>(rows, product.at_column(j));
  if (j < columns) MultiplyRest(rows, columns - j, product.at_column(j));
}

// What y lets through; 0 where it is not positive.
HWY_INLINE VF WherePositive(VF y, VF gradient) {
  return hn::IfThenZeroElse(hn::Le(y, hn::Zero(DF())), gradient);
}

// The gradient of a layer's output, or of its positive part y. Rows are `out` apart.
struct OutputGradient {
  const float* dy;
  const float* y;  // optional
  std::int64_t out;
};

// The `rows` x `count` numbers from `column` on, with zeros where y is not positive: where they
// lie, or in `copy`, whose rows are `count` apart. Sets `ld` to the distance of rows.
HWY_INLINE const float* PositiveOnly(const OutputGradient& from, std::int64_t rows,
                                     std::int64_t column, std::int64_t count,
                                     float* HWY_RESTRICT copy, std::int64_t& ld) {
  if (from.y == nullptr) {
    ld = from.out;
    return from.dy + column;
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* dy = from.dy + i * from.out + column;
    const float* y = from.y + i * from.out + column;
    float* to = copy + i * count;
    ForEachVector(count, [&](std::int64_t j, auto load, auto store)
                             HWY_ATTR { store(WherePositive(load(y + j), load(dy + j)), to + j); });
  }
  ld = count;
  return copy;
}

void FewRowsGradInput(const float* dy, const float* y, const float* w, float* dx, std::int64_t rows,
                      std::int64_t in, std::int64_t out, std::int64_t begin, std::int64_t end) {
  const std::int64_t num_tiles = (rows + kTile - 1) / kTile;
  const std::int64_t tile_rows = (rows + num_tiles - 1) / num_tiles;
  const std::int64_t strip = 2 * Lanes();
  HWY_ALIGN float copy[kernels::kMostFewRows * kMostDepth];
  for (std::int64_t first = 0; first < out; first += kMostDepth) {
    const std::int64_t depth = std::min(kMostDepth, out - first);
    std::int64_t ld = 0;
    const float* gradient = PositiveOnly({dy, y, out}, rows, first, depth, copy, ld);
    for (std::int64_t column = begin; column < end; column += strip) {
      const std::int64_t width = std::min(strip, end - column);
      for (std::int64_t row = 0; row < rows; row += tile_rows) {
        MultiplyColumns(static_cast<int>(std::min(tile_rows, rows - row)), width,
                        {gradient + row * ld, ld, 1, w + first * in + column, in,
                         dx + row * in + column, in, depth, first > 0});
      }
    }
  }
}

void FewRowsGradWeight(const float* dy, const float* y, const float* x, float* dw, bool accumulate,
                       std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                       std::int64_t end) {
  HWY_ALIGN float copy[kernels::kMostFewRows * kTile];
  for (std::int64_t row = begin; row < end; row += kTile) {
    const std::int64_t count = std::min<std::int64_t>(kTile, end - row);
    std::int64_t ld = 0;
    const float* gradient = PositiveOnly({dy, y, out}, rows, row, count, copy, ld);
    MultiplyColumns(static_cast<int>(count), in,
                    {gradient, 1, ld, x, in, dw + row * in, in, rows, accumulate});
  }
}

void FewRowsGradBias(const float* dy, const float* y, float* db, bool accumulate, std::int64_t rows,
                     std::int64_t out) {
  const DF d;
  ForEachVector(out, [&](std::int64_t j, auto load, auto store) HWY_ATTR {
    VF sum = accumulate ? load(db + j) : hn::Zero(d);
    for (std::int64_t i = 0; i < rows; ++i) {
      const VF gradient = load(dy + i * out + j);
      sum = hn::Add(sum, y == nullptr ? gradient : WherePositive(load(y + i * out + j), gradient));
    }
    store(sum, db + j);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(FewRowsForward);
HWY_EXPORT(FewRowsGradInput);
HWY_EXPORT(FewRowsGradWeight);
HWY_EXPORT(FewRowsGradBias);

namespace kernels {

void few_rows_forward(const float* x, const float* w, const float* bias, bool relu, float* y,
                      std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                      std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(FewRowsForward)(x, w, bias, relu, y, rows, in, out, begin, end);
}

void few_rows_grad_input(const float* dy, const float* y, const float* w, float* dx,
                         std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                         std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(FewRowsGradInput)(dy, y, w, dx, rows, in, out, begin, end);
}

void few_rows_grad_weight(const float* dy, const float* y, const float* x, float* dw,
                          bool accumulate, std::int64_t rows, std::int64_t in, std::int64_t out,
                          std::int64_t begin, std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(FewRowsGradWeight)
  (dy, y, x, dw, accumulate, rows, in, out, begin, end);
}

void few_rows_grad_bias(const float* dy, const float* y, float* db, bool accumulate,
                        std::int64_t rows, std::int64_t out) {
  HWY_DYNAMIC_DISPATCH(FewRowsGradBias)(dy, y, db, accumulate, rows, out);
}

}  // namespace kernels
}  // namespace headroom
#endif
