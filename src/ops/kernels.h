#pragma once

// Kernels on raw memory, free of torch. Matrices are row-major and contiguous unless a stride is
// given. Each works on rows (or heads) [begin, end) alone and starts no threads: callers split the
// work. Null pointers leave out the part that is called optional. Activations and their gradients
// are `Values`: floats or bf16 numbers, all of one call in the same type; every kernel computes in
// fp32 and rounds once, to nearest even, where it writes bf16. Parameters, and what is summed over
// rows, are floats.

#include <headroom/ops/transformer.h>

#include <cstdint>

namespace headroom::kernels {

struct Bf16 {
  std::uint16_t bits;
};

/// Where the numbers of a tensor start, and whether they are floats or bf16.
struct Values {
  void* data = nullptr;
  bool is_bf16 = false;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

/// Random keep/drop decisions by counter: element (row, column) is a pure function of the seed.
struct Dropout {
  std::uint64_t seed = 0;
  std::uint32_t threshold =
      0;               ///< drops when the 32 random bits are below: p * 2^32; 0 drops nothing
  float scale = 1.0f;  ///< 1 / (1 - p)
};
/// The two keys of a row.
struct RowKeys {
  std::uint32_t key0, key1;
};
inline RowKeys row_keys(std::uint64_t seed, std::uint64_t row) {
  std::uint64_t z = seed + (row + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return {static_cast<std::uint32_t>(z), static_cast<std::uint32_t>(z >> 32)};
}

// ---- Norms over rows of `width`: layer norm, or without `mean` RMS norm, which subtracts nothing.
// gamma, beta optional.
void layer_norm_forward(Values x, const float* gamma, const float* beta, float eps, Values y,
                        float* mean, float* rstd, std::int64_t begin, std::int64_t end,
                        std::int64_t width);
/// The same output from the kept mean and rstd, bit for bit.
void layer_norm_apply(Values x, const float* gamma, const float* beta, const float* mean,
                      const float* rstd, Values y, std::int64_t begin, std::int64_t end,
                      std::int64_t width);
/// dx = residual (optional) + gradient; dx may be dy. Adds to dgamma and dbeta (width each;
/// optional, dbeta only beside dgamma).
void layer_norm_backward(Values dy, Values x, const float* mean, const float* rstd,
                         const float* gamma, Values residual, Values dx, float* dgamma,
                         float* dbeta, std::int64_t begin, std::int64_t end, std::int64_t width);

// ---- Batch norm of x (num_samples, num_channels, plane), over samples and planes.
struct ChannelPlanes {
  std::int64_t num_samples = 0, num_channels = 0, plane = 0;
};
/// For channels [begin, end): the mean, and the sum of the squared distances to it. Each channel's
/// elements are added in double, one after the other, sample by sample.
void channel_statistics(const float* x, const ChannelPlanes& sizes, float* mean, float* square_sum,
                        std::int64_t begin, std::int64_t end);
/// What scales a channel: mean and rstd of the batch; weight and bias optional.
struct ChannelScales {
  const float *mean = nullptr, *rstd = nullptr, *weight = nullptr, *bias = nullptr;
};
/// For channels [begin, end): y = x * scale + shift with scale = rstd * weight and shift = bias -
/// mean * scale, sums of a product rounded once where the CPU can; with `relu` its positive part.
void normalize_channels(const float* x, const ChannelPlanes& sizes, const ChannelScales& scales,
                        bool relu, float* y, std::int64_t begin, std::int64_t end);
/// For channels [begin, end): masked = dy where that positive part has a derivative, else 0.
/// Samples of dy are dy_stride apart; both may be the same memory.
void mask_channels(const float* x, const ChannelPlanes& sizes, const ChannelScales& scales,
                   const float* dy, std::int64_t dy_stride, float* masked, std::int64_t begin,
                   std::int64_t end);

// ---- Element-wise passes over rows of `width`.
/// y = gelu(h + bias); bias optional; y may be h.
void bias_gelu_forward(GeluKind kind, Values h, const float* bias, Values y, std::int64_t begin,
                       std::int64_t end, std::int64_t width);
/// d = d * gelu'(h + bias) in place; optionally y = gelu(h + bias), bit for bit as forward; adds to
/// dbias (width; optional).
void bias_gelu_backward(GeluKind kind, Values h, const float* bias, Values d, Values y,
                        float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width);
/// y = silu(gate) * up over rows of `width` gates and `width` ups, h = (gate, up); bias (2 width)
/// optional. Rows of y are y_stride apart; y may be h with the stride 2 width.
void swiglu_forward(Values h, const float* bias, Values y, std::int64_t y_stride,
                    std::int64_t begin, std::int64_t end, std::int64_t width);
/// Rows of d hold the gradient of y in their first half, and become the gradient of h, in place;
/// optionally y again, bit for bit as forward; adds to dbias (2 width; optional).
void swiglu_backward(Values h, const float* bias, Values d, Values y, std::int64_t y_stride,
                     float* dbias, std::int64_t begin, std::int64_t end, std::int64_t width);
/// y = x + bias; bias optional.
void add_bias(Values x, const float* bias, Values y, std::int64_t begin, std::int64_t end,
              std::int64_t width);
/// y = residual (optional) + dropout(x + bias); bias optional; y may be x. The random row is
/// first_row + row.
void dropout_add(const Dropout& dropout, Values x, const float* bias, Values residual, Values y,
                 std::int64_t first_row, std::int64_t begin, std::int64_t end, std::int64_t width);
/// sums[j] += sum of x[i][j]; rows of x are `stride` apart.
void column_sums(Values x, std::int64_t stride, float* sums, std::int64_t begin, std::int64_t end,
                 std::int64_t width);
/// out[j] = (accumulate ? out[j] : 0) + the sum over the `count` rows of x, in order, for columns
/// [begin, end).
void reduce_rows(const float* x, float* out, std::int64_t count, std::int64_t width,
                 bool accumulate, std::int64_t begin, std::int64_t end);

// ---- Softmax cross-entropy over rows of logits.
/// Adds the bias (num_classes; optional) to the logits; losses[i] = weight_i (log sum e^logits -
/// logits[target]); with gradients, logits become weight_i * scale * (softmax - one-hot). Rows
/// whose target is ignore_index give 0. weights optional (1 each).
enum class LogitGradients : int {
  kNone,
  kFloat,
  kBf16,  ///< packed at the start of each row: the row's gradients take its first half
};
void cross_entropy_rows(float* logits, const float* bias, const std::int64_t* targets,
                        const float* weights, std::int64_t ignore_index, float scale,
                        LogitGradients gradients, double* losses, std::int64_t begin,
                        std::int64_t end, std::int64_t num_classes);

// ---- Matrix products with few rows, at most kMostFewRows: x (rows, in), w (out, in), y (rows,
// out). A BLAS packs the whole of w for each of them; these read it from where it lies. The order
// of every sum depends on the sizes alone.
constexpr std::int64_t kMostFewRows = 64;
/// y = x w^T + bias (out; optional), and with `relu` its positive part, for columns [begin, end).
void few_rows_forward(const float* x, const float* w, const float* bias, bool relu, float* y,
                      std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                      std::int64_t end);
/// dx = dy w, for columns [begin, end). Here and below, y (optional) is the positive part that dy
/// is the gradient of: dy counts as 0 where y is not positive.
void few_rows_grad_input(const float* dy, const float* y, const float* w, float* dx,
                         std::int64_t rows, std::int64_t in, std::int64_t out, std::int64_t begin,
                         std::int64_t end);
/// dw = (accumulate ? dw : 0) + dy^T x, for rows [begin, end).
void few_rows_grad_weight(const float* dy, const float* y, const float* x, float* dw,
                          bool accumulate, std::int64_t rows, std::int64_t in, std::int64_t out,
                          std::int64_t begin, std::int64_t end);
/// db = (accumulate ? db : 0) + the sum of the rows of dy, in order.
void few_rows_grad_bias(const float* dy, const float* y, float* db, bool accumulate,
                        std::int64_t rows, std::int64_t out);

// ---- Attention. A group is a head of keys and values and the heads of queries that share it; item
// = sample * num_kv_heads + group. Of H heads of queries and K of keys and values of size D, C = H
// D and a row of qkv has (H + 2 K) D channels.
struct AttentionCall {
  Values qkv;                                ///< (B, T, (H + 2 K) D): queries, keys, values
  const float* qkv_bias = nullptr;           ///< ((H + 2 K) D), added while reading; optional
  const unsigned char* key_mask = nullptr;   ///< (B, T), nonzero: visible; optional
  const std::int32_t* first_keys = nullptr;  ///< (B, T), not falling: the first key that a query
                                             ///< sees; optional, with causal
  const float* rotary_cos = nullptr;  ///< (T, D / 2), by which queries and keys are turned, after
  const float* rotary_sin = nullptr;  ///< their bias: channels j and j + D / 2 together; optional
  std::int64_t num_samples = 0, length = 0, num_heads = 0, num_kv_heads = 0, head_size = 0;
  bool causal = false;
  float scale = 1.0f;
  Dropout dropout;
};
/// Floats of scratch that one worker needs.
std::int64_t attention_forward_scratch(std::int64_t length, std::int64_t head_size);
std::int64_t attention_backward_scratch(std::int64_t length, std::int64_t head_size);
/// Writes y (B, T, C) of one item, and of its softmax (B, H, 2, T): the largest score of each query
/// before scaling, and 1 / the sum of e^(scale (score - largest)). Together they are the
/// log-sum-exp, without the rounding of a large number.
void attention_forward_group(const AttentionCall& call, Values y, float* softmax, std::int64_t item,
                             float* scratch);
/// Writes dqkv, like qkv, of one item.
void attention_backward_group(const AttentionCall& call, Values y, const float* softmax, Values dy,
                              Values dqkv, std::int64_t item, float* scratch);

// ---- Conversion, round to nearest even, NaN stays NaN.
void float_to_bf16(const float* from, std::uint16_t* to, std::int64_t count);
void bf16_to_float(const std::uint16_t* from, float* to, std::int64_t count);
void float_to_fp16(const float* from, std::uint16_t* to, std::int64_t count);
void fp16_to_float(const std::uint16_t* from, float* to, std::int64_t count);

}  // namespace headroom::kernels
