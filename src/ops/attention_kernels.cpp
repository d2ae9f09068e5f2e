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
using kernels::Values;

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

// One row of `size` numbers, plus bias, times scale, into dst; zeros up to `padded_size`.
template <class From, class To>
HWY_INLINE void CopyRow(const From* src, const float* bias, float scale, std::int64_t size,
                        std::int64_t padded_size, To* dst) {
  const DF d;
  const VF factor = hn::Set(d, scale);
  const std::int64_t lanes = NumLanes();
  std::int64_t j = 0;
  for (; j + lanes <= size; j += lanes) {
    VF v = LoadVector(d, src + j);
    if (bias != nullptr) v = hn::Add(v, hn::LoadU(d, bias + j));
    StoreVector(hn::Mul(v, factor), d, dst + j);
  }
  if (j < size) {
    const std::int64_t rest = size - j;
    VF v = LoadPart(d, src + j, rest);
    if (bias != nullptr) v = hn::Add(v, LoadPart(d, bias + j, rest));
    StorePart(hn::Mul(v, factor), d, dst + j, rest);
  }
  for (j = size; j < padded_size; ++j) dst[j] = To{};
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

// The addresses of a head of queries: in qkv and its bias, and in y.
template <class T>
struct Head {
  std::int64_t index, start, output_start;  // index: sample * num_heads + head
  const T* source;
  const float* bias;
};

// The addresses of a group in qkv: its keys (part 1), its values (part 2) and its heads of queries.
template <class T>
struct Group {
  Group(const AttentionCall& call, std::int64_t item)
      : sample(item / call.num_kv_heads),
        num_heads(call.num_heads / call.num_kv_heads),
        channels(call.num_heads * call.head_size),
        stride(channels + 2 * call.num_kv_heads * call.head_size),
        first_head(item % call.num_kv_heads * num_heads) {
    for (const int part : {1, 2}) {
      const std::int64_t column =
          channels + ((part - 1) * call.num_kv_heads + item % call.num_kv_heads) * call.head_size;
      start[part] = sample * call.length * stride + column;
      source[part] = call.qkv.as<T>() + start[part];
      bias[part] = call.qkv_bias == nullptr ? nullptr : call.qkv_bias + column;
    }
  }
  Head<T> head(const AttentionCall& call, std::int64_t index) const {
    const std::int64_t head = first_head + index, column = head * call.head_size,
                       at = sample * call.length * stride + column;
    return {sample * call.num_heads + head, at, sample * call.length * channels + column,
            call.qkv.as<T>() + at, call.qkv_bias == nullptr ? nullptr : call.qkv_bias + column};
  }
  std::int64_t sample, num_heads, channels, stride, first_head;
  std::int64_t start[3] = {};
  const T* source[3] = {};
  const float* bias[3] = {};
};

// Turns channels j and j + D / 2 of a query or a key by the angle of its position; `direction` -1
// turns them back.
HWY_INLINE void RotateRow(const AttentionCall& call, std::int64_t position, float direction,
                          float* row) {
  if (call.rotary_cos == nullptr) return;
  const DF d;
  const std::int64_t half = call.head_size / 2, lanes = NumLanes();
  const float* cosines = call.rotary_cos + position * half;
  const float* sines = call.rotary_sin + position * half;
  float *low = row, *high = row + half;
  std::int64_t j = 0;
  for (; j + lanes <= half; j += lanes) {
    const VF a = hn::LoadU(d, low + j), b = hn::LoadU(d, high + j);
    const VF c = hn::LoadU(d, cosines + j),
             s = hn::Mul(hn::LoadU(d, sines + j), hn::Set(d, direction));
    hn::StoreU(hn::NegMulAdd(b, s, hn::Mul(a, c)), d, low + j);
    hn::StoreU(hn::MulAdd(a, s, hn::Mul(b, c)), d, high + j);
  }
  for (; j < half; ++j) {
    const float a = low[j], b = high[j], c = cosines[j], s = sines[j] * direction;
    low[j] = a * c - b * s;
    high[j] = b * c + a * s;
  }
}

// Keys or values of a group, once as panels of rows and once transposed. Either may be null.
// `strip` holds the rows of a panel.
template <class T>
void Pack(const AttentionCall& call, const Group<T>& group, int part, float* strip, float* rows,
          float* transposed) {
  const std::int64_t size = call.head_size, depth = padded(size), width = PanelWidth();
  const std::int64_t length = call.length, padded_length = padded(length);
  for (std::int64_t t0 = 0; t0 < padded_length; t0 += width) {
    for (std::int64_t t = t0; t < t0 + width; ++t) {
      float* row = strip + (t - t0) * depth;
      if (t < length) {
        CopyRow(group.source[part] + t * group.stride, group.bias[part], 1.0f, size, depth, row);
        if (part == 1) RotateRow(call, t, 1.0f, row);
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

// The first key that any query from `query` on sees, at the start of a panel.
HWY_INLINE std::int64_t FirstKey(const AttentionCall& call, std::int64_t sample,
                                 std::int64_t query) {
  if (call.first_keys == nullptr) return 0;
  return call.first_keys[sample * call.length + query] / PanelWidth() * PanelWidth();
}

// Scores of keys before the query's first one.
HWY_INLINE void HideEarlierKeys(const AttentionCall& call, std::int64_t sample, const Tile& tile,
                                std::int64_t row_of_tile, float* row, std::int64_t count) {
  const std::int64_t first = call.first_keys[sample * call.length + tile.query + row_of_tile];
  const std::int64_t end = std::min(count, first - tile.key);
  for (std::int64_t k = 0; k < end; ++k) row[k] = -HUGE_VALF;
}

HWY_INLINE bool AnyVisible(const float* bias, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    if (bias[t] == 0.0f) return true;
  }
  return false;
}

// One query, with its bias and turned to its position; zeros up to `depth`.
template <class T>
HWY_INLINE void CopyQuery(const AttentionCall& call, const Group<T>& group, const Head<T>& head,
                          std::int64_t position, std::int64_t depth, float* row) {
  CopyRow(head.source + position * group.stride, head.bias, 1.0f, call.head_size, depth, row);
  RotateRow(call, position, 1.0f, row);
}

struct ForwardScratch {
  ForwardScratch(float* at, std::int64_t length, std::int64_t depth)
      : keys(at),
        values(keys + length * depth),
        queries(values + length * depth),
        out(queries + kQueryTile * depth),
        scores(out + kQueryTile * depth),
        maxima(scores + std::max(kQueryTile * kScoreStride, kernels::kWidestPanel * depth)),
        sums(maxima + kQueryTile),
        mask(sums + kQueryTile) {}
  float* keys;    // transposed panels
  float* values;  // panels of rows
  float *queries, *out;
  float* scores;  // also the strip of Pack
  float *maxima, *sums, *mask;
};

// Scores of one tile, made into weights; adds the weighted values to s.out.
HWY_INLINE void ForwardTile(const AttentionCall& call, const Tile& tile, const ForwardScratch& s,
                            std::int64_t sample, std::int64_t head_index, std::int64_t depth,
                            std::int64_t padded_length) {
  Scores(tile, s.queries, s.keys, depth, s.scores);
  for (std::int64_t i = 0; i < tile.num_queries; ++i) {
    float* row = s.scores + i * kScoreStride;
    const std::int64_t count = tile.visible(i);
    const std::int64_t group_end =
        tile.visible(std::min(i / kRows * kRows + kRows, tile.num_queries) - 1);
    if (call.key_mask != nullptr) AddRow(row, s.mask + tile.key, count);
    if (call.first_keys != nullptr) HideEarlierKeys(call, sample, tile, i, row, count);
    if (count > 0)
      SoftmaxRow(row, count, call.scale, s.maxima[i], s.sums[i], s.out + i * depth, depth);
    ZeroRow(row, count, group_end);
    if (call.dropout.threshold != 0)
      DropRow(call.dropout, head_index * call.length + tile.query + i, tile.key, row, count);
  }
  WeightedSum(tile, s.scores, s.values, padded_length, depth, s.out);
}

template <class T>
void ForwardHead(const AttentionCall& call, const Group<T>& group, const Head<T>& head,
                 const ForwardScratch& s, std::int64_t num_keys, T* y, float* softmax) {
  const std::int64_t length = call.length, depth = padded(call.head_size),
                     padded_length = padded(length);
  for (std::int64_t query = 0; query < length; query += kQueryTile) {
    const std::int64_t num_queries = std::min(kQueryTile, length - query);
    for (std::int64_t i = 0; i < num_queries; ++i) {
      CopyQuery(call, group, head, query + i, depth, s.queries + i * depth);
      s.maxima[i] = kLowest;
      s.sums[i] = 0.0f;
    }
    std::memset(s.out, 0, static_cast<std::size_t>(num_queries * depth) * sizeof(float));
    const std::int64_t key_end = call.causal ? std::min(num_keys, query + num_queries) : num_keys;
    for (std::int64_t key = FirstKey(call, group.sample, query); key < key_end; key += kKeyTile) {
      const Tile tile{query, num_queries, key, std::min(kKeyTile, key_end - key), call.causal};
      if (call.key_mask != nullptr && !AnyVisible(s.mask, key, key + tile.num_keys)) continue;
      ForwardTile(call, tile, s, group.sample, head.index, depth, padded_length);
    }
    for (std::int64_t i = 0; i < num_queries; ++i) {
      // A row that sees no key gives 0; backward masks its scores, whatever its maximum is.
      const float inverse = s.sums[i] == 0.0f ? 0.0f : 1.0f / s.sums[i];
      T* row = y + head.output_start + (query + i) * group.channels;
      CopyRow(s.out + i * depth, nullptr, inverse, call.head_size, 0, row);
      softmax[head.index * 2 * length + query + i] = s.maxima[i];
      softmax[(head.index * 2 + 1) * length + query + i] = inverse;
    }
  }
}

template <class T>
void ForwardGroupOf(const AttentionCall& call, T* y, float* softmax, std::int64_t item,
                    float* scratch) {
  const Group<T> group(call, item);
  const ForwardScratch s(scratch, padded(call.length), padded(call.head_size));
  Pack(call, group, 1, s.scores, nullptr, s.keys);
  Pack(call, group, 2, s.scores, s.values, nullptr);
  const std::int64_t num_keys =
      call.key_mask == nullptr ? call.length : MaskBias(call, group.sample, s.mask);
  for (std::int64_t head = 0; head < group.num_heads; ++head)
    ForwardHead(call, group, group.head(call, head), s, num_keys, y, softmax);
}

void AttentionForwardGroup(const AttentionCall& call, Values y, float* softmax, std::int64_t item,
                           float* scratch) {
  if (y.is_bf16) {
    ForwardGroupOf(call, y.as<Bf16>(), softmax, item, scratch);
  } else {
    ForwardGroupOf(call, y.as<float>(), softmax, item, scratch);
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

HWY_INLINE float ToFloat(float value) { return value; }
HWY_INLINE float ToFloat(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// deltas[i] = dy_i . y_i, summed in the order in which Multiply sums dP = dy . v: where one key has
// all the weight, y is its value and dP - delta is exactly 0, not a difference of roundings. Rows
// are taken together, because one such sum alone would wait for itself.
template <class T>
HWY_INLINE void Deltas(const float* dout, const T* y, std::int64_t y_stride, std::int64_t num_rows,
                       std::int64_t depth, std::int64_t head_size, float* deltas) {
  const hn::CappedTag<float, 1> d;
  using V = hn::Vec<decltype(d)>;
  constexpr std::int64_t kTogether = 8;
  for (std::int64_t r = 0; r < num_rows; r += kTogether) {
    const std::int64_t count = std::min(kTogether, num_rows - r);
    const float* a[kTogether];
    const T* b[kTogether];
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
        sums[i] = hn::MulAdd(hn::Set(d, a[i][j]), hn::Set(d, ToFloat(b[i][j])), sums[i]);
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
                             const float* softmax, std::int64_t sample, std::int64_t head_index,
                             std::int64_t depth, std::int64_t padded_length) {
  const float* maxima = softmax + head_index * 2 * call.length + tile.query;
  const float* inverse_sums = maxima + call.length;
  Scores(tile, s.queries, s.keys, depth, s.probabilities);
  Scores(tile, s.dout, s.values, depth, s.grads);
  for (std::int64_t i = 0; i < tile.num_queries; ++i) {
    float* p = s.probabilities + i * kScoreStride;
    float* g = s.grads + i * kScoreStride;
    const std::int64_t count = tile.visible(i),
                       random_row = head_index * call.length + tile.query + i;
    // Transposed sums read columns in groups of rows: up to the end of the group that the last
    // visible key is in.
    const std::int64_t end = std::min(tile.num_keys, tile.visible(tile.num_queries - 1));
    if (call.key_mask != nullptr) AddRow(p, s.mask + tile.key, count);
    if (call.first_keys != nullptr) HideEarlierKeys(call, sample, tile, i, p, count);
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

// Writes the gradient of one head of queries; adds what it gives to s.dkeys and s.dvalues.
template <class T>
void BackwardHead(const AttentionCall& call, const Group<T>& group, const Head<T>& head,
                  const BackwardScratch& s, std::int64_t num_keys, const T* y, const float* softmax,
                  const T* dy, T* dqkv) {
  const std::int64_t length = call.length, depth = padded(call.head_size),
                     padded_length = padded(length);
  for (std::int64_t query = 0; query < length; query += kQueryTile) {
    const std::int64_t num_queries = std::min(kQueryTile, length - query);
    for (std::int64_t i = 0; i < num_queries; ++i) {
      const std::int64_t at = head.output_start + (query + i) * group.channels;
      CopyQuery(call, group, head, query + i, depth, s.queries + i * depth);
      CopyRow(dy + at, nullptr, 1.0f, call.head_size, depth, s.dout + i * depth);
      ScatterRow(s.queries + i * depth, depth, i, kQueryTile, s.query_panels);
      ScatterRow(s.dout + i * depth, depth, i, kQueryTile, s.dout_panels);
    }
    Deltas(s.dout, y + head.output_start + query * group.channels, group.channels, num_queries,
           depth, call.head_size, s.deltas);
    std::memset(s.dqueries, 0, static_cast<std::size_t>(num_queries * depth) * sizeof(float));
    const std::int64_t key_end = call.causal ? std::min(num_keys, query + num_queries) : num_keys;
    for (std::int64_t key = FirstKey(call, group.sample, query); key < key_end; key += kKeyTile) {
      const Tile tile{query, num_queries, key, std::min(kKeyTile, key_end - key), call.causal};
      if (call.key_mask != nullptr && !AnyVisible(s.mask, key, key + tile.num_keys)) continue;
      BackwardTile(call, tile, s, softmax, group.sample, head.index, depth, padded_length);
    }
    for (std::int64_t i = 0; i < num_queries; ++i) {
      RotateRow(call, query + i, -1.0f, s.dqueries + i * depth);
      CopyRow(s.dqueries + i * depth, nullptr, call.scale, call.head_size, 0,
              dqkv + head.start + (query + i) * group.stride);
    }
  }
}

template <class T>
void BackwardGroupOf(const AttentionCall& call, const T* y, const float* softmax, const T* dy,
                     T* dqkv, std::int64_t item, float* scratch) {
  const std::int64_t length = call.length, depth = padded(call.head_size),
                     padded_length = padded(length);
  const Group<T> group(call, item);
  const BackwardScratch s(scratch, padded_length, depth);
  Pack(call, group, 1, s.probabilities, s.key_rows, s.keys);
  Pack(call, group, 2, s.probabilities, nullptr, s.values);
  std::memset(s.dkeys, 0, static_cast<std::size_t>(2 * padded_length * depth) * sizeof(float));
  const std::int64_t num_keys =
      call.key_mask == nullptr ? length : MaskBias(call, group.sample, s.mask);
  for (std::int64_t head = 0; head < group.num_heads; ++head)
    BackwardHead(call, group, group.head(call, head), s, num_keys, y, softmax, dy, dqkv);
  for (std::int64_t t = 0; t < length; ++t) {
    RotateRow(call, t, -1.0f, s.dkeys + t * depth);
    CopyRow(s.dkeys + t * depth, nullptr, call.scale, call.head_size, 0,
            dqkv + group.start[1] + t * group.stride);
    CopyRow(s.dvalues + t * depth, nullptr, 1.0f, call.head_size, 0,
            dqkv + group.start[2] + t * group.stride);
  }
}

void AttentionBackwardGroup(const AttentionCall& call, Values y, const float* softmax, Values dy,
                            Values dqkv, std::int64_t item, float* scratch) {
  if (y.is_bf16) {
    BackwardGroupOf(call, y.as<Bf16>(), softmax, dy.as<Bf16>(), dqkv.as<Bf16>(), item, scratch);
  } else {
    BackwardGroupOf(call, y.as<float>(), softmax, dy.as<float>(), dqkv.as<float>(), item, scratch);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace headroom
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace headroom {
HWY_EXPORT(AttentionForwardGroup);
HWY_EXPORT(AttentionBackwardGroup);

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

void attention_forward_group(const AttentionCall& call, Values y, float* softmax, std::int64_t item,
                             float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionForwardGroup)(call, y, softmax, item, scratch);
}

void attention_backward_group(const AttentionCall& call, Values y, const float* softmax, Values dy,
                              Values dqkv, std::int64_t item, float* scratch) {
  HWY_DYNAMIC_DISPATCH(AttentionBackwardGroup)(call, y, softmax, dy, dqkv, item, scratch);
}

}  // namespace kernels
}  // namespace headroom
#endif
