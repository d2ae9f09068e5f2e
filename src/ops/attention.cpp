#include <headroom/ops/attention.h>

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
                            const ops::AttentionParams& params, double dropout_p) {
    const std::int64_t num_samples = qkv.size(0), length = qkv.size(1);
    at::Tensor y = ops::make_floats({num_samples, length, qkv.size(2) / 3}, qkv);
    at::Tensor softmax = ops::make_floats({num_samples, params.num_heads, 2, length}, qkv);
    ops::attention_forward(params, qkv, {}, y, softmax);
    ctx->save_for_backward({qkv, y, params.key_mask});
    ops::keep_exact(ctx->saved_data, "softmax", softmax);
    ctx->saved_data["num_heads"] = params.num_heads;
    ctx->saved_data["causal"] = params.causal;
    ctx->saved_data["dropout_p"] = dropout_p;
    ctx->saved_data["seed"] = static_cast<std::int64_t>(params.dropout.seed);
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("attention");
    const variable_list saved = ctx->get_saved_variables();
    ops::AttentionParams params;
    params.num_heads = ctx->saved_data["num_heads"].toInt();
    params.causal = ctx->saved_data["causal"].toBool();
    params.dropout =
        ops::dropout_from_seed(ctx->saved_data["dropout_p"].toDouble(),
                               static_cast<std::uint64_t>(ctx->saved_data["seed"].toInt()));
    params.key_mask = saved[2];
    at::Tensor dqkv = at::empty_like(saved[0]);
    ops::attention_backward(params, saved[0], {}, saved[1],
                            ops::take_exact(ctx->saved_data, "softmax"), grads[0].contiguous(),
                            dqkv);
    return {dqkv, {}, {}};
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& input, std::int64_t num_heads,
                     const AttentionOptions& options) {
  const at::Tensor qkv = ops::as_kernel_input(input);
  ops::check_attention_sizes(qkv, num_heads, 3, options);
  const at::Tensor key_mask = ops::key_mask_of(options, qkv);
  if (!ops::has_kernels(qkv))
    return ops::plain_attention(qkv, num_heads, options.causal, key_mask, options.dropout_p);
  ops::AttentionParams params;
  params.num_heads = num_heads;
  params.causal = options.causal;
  params.dropout = ops::draw_dropout(options.dropout_p);
  params.key_mask = key_mask;
  return AttentionFunction::apply(qkv.contiguous(), params, options.dropout_p);
}

}  // namespace headroom
