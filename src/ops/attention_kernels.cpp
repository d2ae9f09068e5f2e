#include "ops/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention_kernels.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ops/simd-inl.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#ifndef HEADROOM_OPS_ATTENTION_TILES_H_
#define HEADROOM_OPS_ATTENTION_TILES_H_
namespace headroom::kernels {
constexpr std::int64_t kQueryTile =
    48;                                 // divisible by the rows of the micro-kernel on every target
constexpr std::int64_t kKeyTile = 256;  // divisible by the widest panel
constexpr std::int64_t kWidestPanel = 32;  // two vectors of 16 lanes
constexpr std::int64_t kScoreStride =
    kKeyTile + 16;  // not a power of two: rows of a tile fall into different cache sets
constexpr float kLowest = -1e30f;

inline std::int64_t padded(std::int64_t count) {
  return (count + kWidestPanel - 1) / kWidestPanel * kWidestPanel;
}
}  // namespace headroom::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace headroom {
namespace HWY_NAMESPACE {

using kernels::AttentionCall;
using kernels::kKeyTile;
using kernels::kLowest;
using kernels::kQueryTile;
using kernels::kScoreStride;
using kernels::padded;

// Rows of the micro-kernel: with two vectors per row, as many accumulators as there are registers.
constexpr int kRows = HWY_TARGET <= HWY_AVX3 ? 12 : 6;
static_assert(kQueryTile % kRows == 0, "a query tile is whole groups of rows");

HWY_INLINE std::int64_t NumLanes() { return static_cast<std::int64_t>(hn::Lanes(DF())); }
HWY_INLINE std::int64_t PanelWidth() { return 2 * NumLanes(); }

// C (kCount x panel) += A (kCount x depth) * B (depth x panel). kTransposed: A(i, k) is at a[k *
// lda + i], else at a[i * lda + k].
template <int kCount, bool kTransposed>
HWY_INLINE void MultiplyRows(std::int64_t depth, const float* HWY_RESTRICT a, std::int64_t lda,
                             const float* HWY_RESTRICT b, float* HWY_RESTRICT c, std::int64_t ldc,
                             bool accumulate) {
  const DF d;
  const std::int64_t lanes = NumLanes();
  VF left[kCount], right[kCount];
#pragma GCC unroll 12
  for (int i = 0; i < kCount; ++i) {
    left[i] = accumulate ? hn::LoadU(d, c + i * ldc) : hn::Zero(d);
    right[i] = accumulate ? hn::LoadU(d, c + i * ldc + lanes) : hn::Zero(d);
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    const VF b0 = hn::LoadU(d, b + k * 2 * lanes);
    const VF b1 = hn::LoadU(d, b + k * 2 * lanes + lanes);
#pragma GCC unroll 12
    for (int i = 0; i < kCount; ++i) {
      const VF value = hn::Set(d, kTransposed ? a[k * lda + i] : a[i * lda + k]);
      left[i] = hn::MulAdd(value, b0, left[i]);
      right[i] = hn::MulAdd(value, b1, right[i]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kCount; ++i) {
    hn::StoreU(left[i], d, c + i * ldc);
    hn::StoreU(right[i], d, c + i * ldc + lanes);
  }
}

template <int kCount, bool kTransposed>
HWY_NOINLINE void MultiplyUpTo(int count, std::int64_t depth, const float* a, std::int64_t lda,
                               const float* b, float* c, std::int64_t ldc, bool accumulate) {
  if (count == kCount) {
    MultiplyRows<kCount, kTransposed>(depth, a, lda, b, c, ldc, accumulate);
  } else if constexpr (kCount > 1) {
    MultiplyUpTo<kCount - 1, kTransposed>(count, depth, a, lda, b, c, ldc, accumulate);
  }
}

template <bool kTransposed>
HWY_INLINE void Multiply(std::int64_t count, std::int64_t depth, const float* a, std::int64_t lda,
                         const float* b, float* c, std::int64_t ldc, bool accumulate) {
  MultiplyUpTo<kRows, kTransposed>(static_cast<int>(count), depth, a, lda, b, c, ldc, accumulate);
}

// dst (4 x 4) = transposed src.
HWY_INLINE void Transpose4(const float* src, std::int64_t src_stride, float* dst,
                           std::int64_t dst_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) dst[j * dst_stride + i] = src[i * src_stride + j];
  }
#else
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> dd;
  const auto r0 = hn::LoadU(d, src), r1 = hn::LoadU(d, src + src_stride);
  const auto r2 = hn::LoadU(d, src + 2 * src_stride), r3 = hn::LoadU(d, src + 3 * src_stride);
  const auto a = hn::BitCast(dd, hn::InterleaveLower(d, r0, r1)),
             b = hn::BitCast(dd, hn::InterleaveLower(d, r2, r3));
  const auto e = hn::BitCast(dd, hn::InterleaveUpper(d, r0, r1)),
             f = hn::BitCast(dd, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, a, b)), d, dst);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, a, b)), d, dst + dst_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, e, f)), d, dst + 2 * dst_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, e, f)), d, dst + 3 * dst_stride);
#endif
}

// One row of `size` floats, plus bias, times scale, into dst; zeros up to `padded_size`.
HWY_INLINE void CopyRow(const float* src, const float* bias, float scale, std::int64_t size,
                        std::int64_t padded_size, float* dst) {
  const DF d;
  const VF factor = hn::Set(d, scale);
  const std::int64_t lanes = NumLanes();
  std::int64_t j = 0;
  for (; j + lanes <= size; j += lanes) {
    VF v = hn::LoadU(d, src + j);
    if (bias != nullptr) v = hn::Add(v, hn::LoadU(d, bias + j));
    hn::StoreU(hn::Mul(v, factor), d, dst + j);
  }
  for (; j < size; ++j) dst[j] = (src[j] + (bias == nullptr ? 0.0f : bias[j])) * scale;
  for (; j < padded_size; ++j) dst[j] = 0.0f;
}

// `row` (padded_size) into panels: dst[panel][at][lane], each panel `panel_rows` rows high.
HWY_INLINE void ScatterRow(const float* row, std::int64_t padded_size, std::int64_t at,
                           std::int64_t panel_rows, float* dst) {
  const DF d;
  const std::int64_t lanes = NumLanes(), width = PanelWidth();
  for (std::int64_t p = 0; p < padded_size; p += width) {
    float* to = dst + p * panel_rows + at * width;
    hn::StoreU(hn::LoadU(d, row + p), d, to);
    hn::StoreU(hn::LoadU(d, row + p + lanes), d, to + lanes);
  }
}

// The addresses of one head in (B, T, 3C).
struct Head {
  Head(const AttentionCall& call, std::int64_t item)
      : sample(item / call.num_heads),
        head(item % call.num_heads),
        channels(call.num_heads * call.head_size),
        stride(3 * channels) {
    const std::int64_t offset = sample * call.length * stride + head * call.head_size;
    for (int part = 0; part < 3; ++part) {
      start[part] = offset + part * channels;
      source[part] = call.qkv + start[part];
      bias[part] = call.qkv_bias == nullptr
                       ? nullptr
                       : call.qkv_bias + part * channels + head * call.head_size;
    }
    output_start = sample * call.length * channels + head * call.head_size;
  }
  std::int64_t sample, head, channels, stride, output_start = 0;
  std::int64_t start[3] = {};
  const float* source[3] = {};
  const float* bias[3] = {};
};

// Keys or values of a head, once as panels of rows and once transposed. Either may be null. `row`
// holds a strip of rows.
void PackHead(const AttentionCall& call, const Head& head, int part, float* strip, float* rows,
              float* transposed) {
  const std::int64_t size = call.head_size, depth = padded(size), width = PanelWidth();
  const std::int64_t length = call.length, padded_length = padded(length);
  for (std::int64_t t0 = 0; t0 < padded_length; t0 += width) {
    for (std::int64_t t = t0; t < t0 + width; ++t) {
      float* row = strip + (t - t0) * depth;
      if (t < length) {
        CopyRow(head.source[part] + t * head.stride, head.bias[part], 1.0f, size, depth, row);
      } else {
        std::memset(row, 0, static_cast<std::size_t>(depth) * sizeof(float));
      }
      if (rows != nullptr) ScatterRow(row, depth, t, padded_length, rows);
    }
    if (transposed == nullptr) continue;
    // Panels [t / width][depth][width]. A scalar target has panels narrower than four.
    if (width < 4) {
      for (std::int64_t t = 0; t < width; ++t) {
        for (std::int64_t j = 0; j < depth; ++j)
          transposed[t0 * depth + j * width + t] = strip[t * depth + j];
      }
    } else {
      for (std::int64_t t = 0; t < width; t += 4) {
        for (std::int64_t j = 0; j < depth; j += 4)
          Transpose4(strip + t * depth + j, depth, transposed + t0 * depth + j * width + t, width);
      }
    }
  }
}

// What a query tile sees of a key tile.
struct Tile {
  std::int64_t query, num_queries, key, num_keys;
  bool causal;
  // Keys that rows [0, row] of the tile can see at most.
  HWY_INLINE std::int64_t visible(std::int64_t row) const {
    return causal ? std::max<std::int64_t>(0, std::min(query + row + 1 - key, num_keys)) : num_keys;
  }
};

// scores (queries x keys) = queries * keys^T, where a group of rows needs them.
HWY_INLINE void Scores(const Tile& tile, const float* queries, const float* keys_transposed,
                       std::int64_t depth, float* scores) {
  const std::int64_t width = PanelWidth();
  for (std::int64_t j = 0; j < tile.num_keys; j += width) {
    const float* panel = keys_transposed + (tile.key + j) * depth;
    for (std::int64_t r = 0; r < tile.num_queries; r += kRows) {
      const std::int64_t count = std::min<std::int64_t>(kRows, tile.num_queries - r);
      if (j >= tile.visible(r + count - 1)) continue;
      Multiply<false>(count, depth, queries + r * depth, depth, panel,
                      scores + r * kScoreStride + j, kScoreStride, false);
    }
  }
}

// out (queries x depth) += weights (queries x keys) * keys (panels of rows).
HWY_INLINE void WeightedSum(const Tile& tile, const float* weights, const float* rows,
                            std::int64_t padded_length, std::int64_t depth, float* out) {
  const std::int64_t width = PanelWidth();
  for (std::int64_t p = 0; p < depth; p += width) {
    const float* panel = rows + p * padded_length + tile.key * width;
    for (std::int64_t r = 0; r < tile.num_queries; r += kRows) {
      const std::int64_t count = std::min<std::int64_t>(kRows, tile.num_queries - r);
      const std::int64_t visible = tile.visible(r + count - 1);
      if (visible > 0)
        Multiply<false>(count, visible, weights + r * kScoreStride, kScoreStride, panel,
                        out + r * depth + p, depth, true);
    }
  }
}

// out (keys x depth) += weights^T (keys x queries) * panels (queries x depth).
HWY_INLINE void TransposedSum(const Tile& tile, const float* weights, const float* panels,
                              std::int64_t depth, float* out) {
  const std::int64_t width = PanelWidth();
  for (std::int64_t p = 0; p < depth; p += width) {
    for (std::int64_t j = 0; j < tile.num_keys; j += kRows) {
      const std::int64_t count = std::min<std::int64_t>(kRows, tile.num_keys - j);
      const std::int64_t first =
          tile.causal ? std::max<std::int64_t>(0, tile.key + j - tile.query) : 0;
      if (first >= tile.num_queries) continue;
      Multiply<true>(count, tile.num_queries - first, weights + first * kScoreStride + j,
                     kScoreStride, panels + p * kQueryTile + first * width,
                     out + (tile.key + j) * depth + p, depth, true);
    }
  }
}

HWY_INLINE void AddRow(float* row, const float* add, std::int64_t count) {
  const DF d;
  for (std::int64_t k = 0; k < count; k += NumLanes())
    hn::StoreU(hn::Add(hn::LoadU(d, row + k), hn::LoadU(d, add + k)), d, row + k);
}

HWY_INLINE void DropRow(const kernels::Dropout& dropout, std::int64_t row_index, std::int64_t key,
                        float* row, std::int64_t count) {
  const DF d;
  const kernels::RowKeys keys =
      kernels::row_keys(dropout.seed, static_cast<std::uint64_t>(row_index));
  const VF scale = hn::Set(d, dropout.scale);
  for (std::int64_t k = 0; k < count; k += NumLanes()) {
    const VF factor = KeepFactor(d, keys.key0, keys.key1, static_cast<std::uint32_t>(key + k),
                                 dropout.threshold, scale);
    hn::StoreU(hn::Mul(hn::LoadU(d, row + k), factor), d, row + k);
  }
}

HWY_INLINE void ZeroRow(float* row, std::int64_t begin, std::int64_t end) {
  for (std::int64_t k = begin; k < end; ++k) row[k] = 0.0f;
}

// Scores are scaled after the maximum is subtracted: near the maximum, where the weights are large,
// the difference is exact, so that huge scores lose no more than their own rounding.
HWY_INLINE VF ExpOfScore(DF d, const float* score, VF maximum, VF scale) {
  return Exp(d, hn::Mul(hn::Sub(hn::LoadU(d, score), maximum), scale));
}

// Turns a row of scores into e^(scale (score - maximum)); updates the running maximum and sum, and
// rescales what was summed before.
HWY_INLINE void SoftmaxRow(float* row, std::int64_t count, float scale, float& maximum, float& sum,
                           float* out, std::int64_t depth) {
  const DF d;
  const std::int64_t lanes = NumLanes();
  std::int64_t k = 0;
  VF highest = hn::Set(d, maximum);
  for (; k + lanes <= count; k += lanes) highest = hn::Max(highest, hn::LoadU(d, row + k));
  const auto rest = hn::FirstN(d, static_cast<std::size_t>(count - k));
  if (k < count)
    highest = hn::Max(highest, hn::IfThenElse(rest, hn::LoadU(d, row + k), hn::Set(d, kLowest)));
  const float next = Largest(d, highest);
  const VF shift = hn::Set(d, next), factor = hn::Set(d, scale);
  VF total = hn::Zero(d);
  for (k = 0; k + lanes <= count; k += lanes) {
    const VF e = ExpOfScore(d, row + k, shift, factor);
    hn::StoreU(e, d, row + k);
    total = hn::Add(total, e);
  }
  if (k < count) {
    const VF e = hn::IfThenElseZero(rest, ExpOfScore(d, row + k, shift, factor));
    hn::StoreU(e, d, row + k);
    total = hn::Add(total, e);
  }
  const float correction = std::exp((maximum - next) * scale);
  sum = sum * correction + Sum(d, total);
  if (correction != 1.0f && maximum > kLowest) {
    const VF rescale = hn::Set(d, correction);
    for (std::int64_t j = 0; j < depth; j += lanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, out + j), rescale), d, out + j);
  }
  maximum = next;
}

// The key mask of a sample as numbers to add to the scores; returns the number of keys up to the
// last visible one.
HWY_INLINE std::int64_t MaskBias(const AttentionCall& call, std::int64_t sample, float* bias) {
  const unsigned char* mask = call.key_mask + sample * call.length;
  std::int64_t last = 0;
  for (std::int64_t t = 0; t < call.length; ++t) {
    bias[t] = mask[t] != 0 ? 0.0f : -HUGE_VALF;
    if (mask[t] != 0) last = t + 1;
  }
  for (std::int64_t t = call.length; t < padded(call.length) + 16; ++t) bias[t] = -HUGE_VALF;
  return last;
}

HWY_INLINE bool AnyVisible(const float* bias, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    if (bias[t] == 0.0f) return true;
  }
  return false;
}

void AttentionForwardHead(const AttentionCall& call, float* y, float* softmax, std::int64_t item,
                          float* scratch) {
  const std::int64_t length = call.length, depth = padded(call.head_size),
                     padded_length = padded(length);
  const Head head(call, item);
  float* keys = scratch;                         // transposed panels
  float* values = keys + padded_length * depth;  // panels of rows
  float* queries = values + padded_length * depth;
  float* out = queries + kQueryTile * depth;
  float* scores = out + kQueryTile * depth;  // also the strip of PackHead
  float* maxima = scores + std::max(kQueryTile * kScoreStride, kernels::kWidestPanel * depth);
  float* sums = maxima + kQueryTile;
  float* mask = sums + kQueryTile;
  PackHead(call, head, 1, scores, nullptr, keys);
  PackHead(call, head, 2, scores, values, nullptr);
  const std::int64_t num_keys =
      call.key_mask == nullptr ? length : MaskBias(call, head.sample, mask);
  for (std::int64_t query = 0; query < length; query += kQueryTile) {
    const std::int64_t num_queries = std::min(kQueryTile, length - query);
    for (std::int64_t i = 0; i < num_queries; ++i) {
      CopyRow(head.source[0] + (query + i) * head.stride, head.bias[0], 1.0f, call.head_size, depth,
              queries + i * depth);
      maxima[i] = kLowest;
      sums[i] = 0.0f;
    }
    std::memset(out, 0, static_cast<std::size_t>(num_queries * depth) * sizeof(float));
    const std::int64_t key_end = call.causal ? std::min(num_keys, query + num_queries) : num_keys;
    for (std::int64_t key = 0; key < key_end; key += kKeyTile) {
      const Tile tile{query, num_queries, key, std::min(kKeyTile, key_end - key), call.causal};
      if (call.key_mask != nullptr && !AnyVisible(mask, key, key + tile.num_keys)) continue;
      Scores(tile, queries, keys, depth, scores);
      for (std::int64_t i = 0; i < num_queries; ++i) {
        float* row = scores + i * kScoreStride;
        const std::int64_t count = tile.visible(i);
        const std::int64_t group_end =
            tile.visible(std::min(i / kRows * kRows + kRows, num_queries) - 1);
        if (call.key_mask != nullptr) AddRow(row, mask + key, count);
        if (count > 0)
          SoftmaxRow(row, count, call.scale, maxima[i], sums[i], out + i * depth, depth);
        ZeroRow(row, count, group_end);
        if (call.dropout.threshold != 0)
          DropRow(call.dropout, item * length + query + i, key, row, count);
      }
      WeightedSum(tile, scores, values, padded_length, depth, out);
    }
    for (std::int64_t i = 0; i < num_queries; ++i) {
      // A row that sees no key gives 0; backward masks its scores, whatever its maximum is.
      const float inverse = sums[i] == 0.0f ? 0.0f : 1.0f / sums[i];
      float* row = y + head.output_start + (query + i) * head.channels;
      CopyRow(out + i * depth, nullptr, inverse, call.head_size, 0, row);
      softmax[item * 2 * length + query + i] = maxima[i];
      softmax[(item * 2 + 1) * length + query + i] = inverse;
    }
  }
}

// What forward kept of the softmax of a row, and what backward subtracts.
struct SoftmaxOfRow {
  float scale, maximum, inverse_sum, delta;
};

// Turns scores into probabilities and dP into dS = P (dP - delta).
HWY_INLINE void BackwardRow(float* probabilities, float* grads, std::int64_t count,
                            const SoftmaxOfRow& softmax) {
  const DF d;
  const std::int64_t lanes = NumLanes();
  const VF scale = hn::Set(d, softmax.scale), shift = hn::Set(d, softmax.maximum);
  const VF inverse = hn::Set(d, softmax.inverse_sum), center = hn::Set(d, softmax.delta);
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes) {
    const VF p = hn::Mul(ExpOfScore(d, probabilities + k, shift, scale), inverse);
    hn::StoreU(p, d, probabilities + k);
    hn::StoreU(hn::Mul(p, hn::Sub(hn::LoadU(d, grads + k), center)), d, grads + k);
  }
  if (k < count) {
    const auto rest = hn::FirstN(d, static_cast<std::size_t>(count - k));
    const VF p =
        hn::IfThenElseZero(rest, hn::Mul(ExpOfScore(d, probabilities + k, shift, scale), inverse));
    hn::StoreU(p, d, probabilities + k);
    hn::StoreU(hn::IfThenElseZero(rest, hn::Mul(p, hn::Sub(hn::LoadU(d, grads + k), center))), d,
               grads + k);
  }
}

// deltas[i] = dy_i . y_i, summed in the order in which Multiply sums dP = dy . v: where one key has
// all the weight, y is its value and dP - delta is exactly 0, not a difference of roundings. Rows
// are taken together, because one such sum alone would wait for itself.
HWY_INLINE void Deltas(const float* dout, const float* y, std::int64_t y_stride,
                       std::int64_t num_rows, std::int64_t depth, std::int64_t head_size,
                       float* deltas) {
  const hn::CappedTag<float, 1> d;
  using V = hn::Vec<decltype(d)>;
  constexpr std::int64_t kTogether = 8;
  for (std::int64_t r = 0; r < num_rows; r += kTogether) {
    const std::int64_t count = std::min(kTogether, num_rows - r);
    const float* a[kTogether];
    const float* b[kTogether];
    V sums[kTogether];
    for (std::int64_t i = 0; i < kTogether; ++i) {
      const std::int64_t row = r + std::min(i, count - 1);
      a[i] = dout + row * depth;
      b[i] = y + row * y_stride;
      sums[i] = hn::Zero(d);
    }
    for (std::int64_t j = 0; j < head_size; ++j) {
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < kTogether; ++i)
        sums[i] = hn::MulAdd(hn::Set(d, a[i][j]), hn::Set(d, b[i][j]), sums[i]);
    }
    for (std::int64_t i = 0; i < count; ++i) deltas[r + i] = hn::GetLane(sums[i]);
  }
}

struct BackwardScratch {
  BackwardScratch(float* at, std::int64_t length, std::int64_t depth) {
    const auto take = [&at](std::int64_t count) {
      float* start = at;
      at += count;
      return start;
    };
    key_rows = take(length * depth);
    keys = take(length * depth);
    values = take(length * depth);
    dkeys = take(length * depth);
    dvalues = take(length * depth);
    queries = take(kQueryTile * depth);
    query_panels = take(kQueryTile * depth);
    dout = take(kQueryTile * depth);
    dout_panels = take(kQueryTile * depth);
    dqueries = take(kQueryTile * depth);
    probabilities = take(std::max(kQueryTile * kScoreStride, kernels::kWidestPanel * depth));
    grads = take(kQueryTile * kScoreStride);
    deltas = take(kQueryTile);
    mask = take(length + 16);
  }
  float *key_rows, *keys, *values, *dkeys, *dvalues, *queries, *query_panels, *dout, *dout_panels,
      *dqueries, *probabilities, *grads, *deltas, *mask;
};

// Adds what one tile of queries and keys gives to dkeys, dvalues and dqueries.
HWY_INLINE void BackwardTile(const AttentionCall& call, const Tile& tile, const BackwardScratch& s,
                             const float* softmax, std::int64_t item, std::int64_t depth,
                             std::int64_t padded_length) {
  const float* maxima = softmax + item * 2 * call.length + tile.query;
  const float* inverse_sums = maxima + call.length;
  Scores(tile, s.queries, s.keys, depth, s.probabilities);
  Scores(tile, s.dout, s.values, depth, s.grads);
  for (std::int64_t i = 0; i < tile.num_queries; ++i) {
    float* p = s.probabilities + i * kScoreStride;
    float* g = s.grads + i * kScoreStride;
    const std::int64_t count = tile.visible(i), random_row = item * call.length + tile.query + i;
    // Transposed sums read columns in groups of rows: up to the end of the group that the last
    // visible key is in.
    const std::int64_t end = std::min(tile.num_keys, tile.visible(tile.num_queries - 1));
    if (call.key_mask != nullptr) AddRow(p, s.mask + tile.key, count);
    if (call.dropout.threshold != 0) DropRow(call.dropout, random_row, tile.key, g, count);
    BackwardRow(p, g, count, {call.scale, maxima[i], inverse_sums[i], s.deltas[i]});
    if (call.dropout.threshold != 0) DropRow(call.dropout, random_row, tile.key, p, count);
    ZeroRow(p, count, end);
    ZeroRow(g, count, end);
  }
  TransposedSum(tile, s.probabilities, s.dout_panels, depth, s.dvalues);
  TransposedSum(tile, s.grads, s.query_panels, depth, s.dkeys);
  WeightedSum(tile, s.grads, s.key_rows, padded_length, depth, s.dqueries);
}

void AttentionBackwardHead(const AttentionCall& call, const float* y, const float* softmax,
                           const float* dy, float* dqkv, std::int64_t item, float* scratch) {
  const std::int64_t length = call.length, depth = padded(call.head_size),
                     padded_length = padded(length);
  const Head head(call, item);
  const BackwardScratch s(scratch, padded_length, depth);
  PackHead(call, head, 1, s.probabilities, s.key_rows, s.keys);
  PackHead(call, head, 2, s.probabilities, nullptr, s.values);
  std::memset(s.dkeys, 0, static_cast<std::size_t>(2 * padded_length * depth) * sizeof(float));
  const std::int64_t num_keys =
      call.key_mask == nullptr ? length : MaskBias(call, head.sample, s.mask);
  for (std::int64_t query = 0; query < length; query += kQueryTile) {
    const std::int64_t num_queries = std::min(kQueryTile, length - query);
    for (std::int64_t i = 0; i < num_queries; ++i) {
      const std::int64_t at = head.output_start + (query + i) * head.channels;
      CopyRow(head.source[0] + (query + i) * head.stride, head.bias[0], 1.0f, call.head_size, depth,
              s.queries + i * depth);
      CopyRow(dy + at, nullptr, 1.0f, call.head_size, depth, s.dout + i * depth);
      ScatterRow(s.queries + i * depth, depth, i, kQueryTile, s.query_panels);
      ScatterRow(s.dout + i * depth, depth, i, kQueryTile, s.dout_panels);
    }
    Deltas(s.dout, y + head.output_start + query * head.channels, head.channels, num_queries, depth,
           call.head_size, s.deltas);
    std::memset(s.dqueries, 0, static_cast<std::size_t>(num_queries * depth) * sizeof(float));
    const std::int64_t key_end = call.causal ? std::min(num_keys, query + num_queries) : num_keys;
    for (std::int64_t key = 0; key < key_end; key += kKeyTile) {
      const Tile tile{query, num_queries, key, std::min(kKeyTile, key_end - key), call.causal};
      if (call.key_mask != nullptr && !AnyVisible(s.mask, key, key + tile.num_keys)) continue;
      BackwardTile(call, tile, s, softmax, item, depth, padded_length);
    }
    for (std::int64_t i = 0; i < num_queries; ++i) {
      CopyRow(s.dqueries + i * depth, nullptr, call.scale, call.head_size, 0,
              dqkv + head.start[0] + (query + i) * head.stride);
    }
  }
  for (std::int64_t t = 0; t < length; ++t) {
    CopyRow(s.dkeys + t * depth, nullptr, call.scale, call.head_size, 0,
            dqkv + head.start[1] + t * head.stride);
    CopyRow(s.dvalues + t * depth, nullptr, 1.0f, call.head_size, 0,
            dqkv + head.start[2] + t * head.stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(AttentionForwardHead);
HWY_EXPORT(AttentionBackwardHead);

namespace kernels {

std::int64_t attention_forward_scratch(std::int64_t length, std::int64_t head_size) {
  const std::int64_t depth = padded(head_size);
  return 2 * padded(length) * depth + 2 * kQueryTile * depth +
         std::max(kQueryTile * kScoreStride, kWidestPanel * depth) + 2 * kQueryTile +
         padded(length) + 16;
}

std::int64_t attention_backward_scratch(std::int64_t length, std::int64_t head_size) {
  const std::int64_t depth = padded(head_size);
  return 5 * padded(length) * depth + 5 * kQueryTile * depth +
         std::max(kQueryTile * kScoreStride, kWidestPanel * depth) + kQueryTile * kScoreStride +
         kQueryTile + padded(length) + 16;
}

void attention_forward_head(const AttentionCall& call, float* y, float* softmax, std::int64_t item,
                            float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionForwardHead)(call, y, softmax, item, scratch);
}

void attention_backward_head(const AttentionCall& call, const float* y, const float* softmax,
                             const float* dy, float* dqkv, std::int64_t item, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionBackwardHead)(call, y, softmax, dy, dqkv, item, scratch);
}

}  // namespace kernels
}  // namespace headroom
#endif
