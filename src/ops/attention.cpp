#include <headroom/ops/transformer.h>

#include "ops/once.h"
#include "ops/passes.h"
#include "ops/plain.h"
#include "ops/sizes.h"

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv,
                            const ops::AttentionParams& params) {
    const std::int64_t num_samples = qkv.size(0), length = qkv.size(1);
    at::Tensor y = ops::make_values(
        {num_samples, length, params.num_heads * params.head_size(qkv.size(2))}, qkv);
    at::Tensor softmax = ops::make_floats({num_samples, params.num_heads, 2, length}, qkv);
    ops::attention_forward(params, qkv, {}, y, softmax);
    ctx->save_for_backward({qkv, y, params.key_mask});
    ops::keep_exact(ctx->saved_data, "softmax", softmax);
    params.keep(ctx->saved_data);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("attention");
    const variable_list saved = ctx->get_saved_variables();
    const ops::AttentionParams params(ctx->saved_data, saved[2]);
    at::Tensor dqkv = at::empty_like(saved[0]);
    ops::attention_backward(params, saved[0], {}, saved[1],
                            ops::take_exact(ctx->saved_data, "softmax"), grads[0].contiguous(),
                            dqkv);
    return {dqkv, {}};
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& qkv, std::int64_t num_heads,
                     const AttentionOptions& options) {
  ops::check_attention_sizes(qkv, qkv.size(-1), num_heads, options);
  if (!ops::has_kernels(qkv)) return ops::plain_attention(qkv, num_heads, options);
  return AttentionFunction::apply(qkv.contiguous(), ops::AttentionParams(num_heads, options, qkv));
}

}  // namespace headroom
