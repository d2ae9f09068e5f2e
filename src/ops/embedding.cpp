#include "ops/embedding.h"

#include "core/parallel.h"
#include "ops/once.h"
#include "ops/passes.h"
#include "ops/sizes.h"

#include <headroom/core/error.h>

#include <torch/csrc/autograd/custom_function.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tokens,
                            const at::Tensor& token_weight, const at::Tensor& position_weight) {
    const std::int64_t length = tokens.size(1), width = token_weight.size(1);
    at::Tensor y = ops::make_floats({tokens.size(0), length, width}, token_weight);
    ctx->save_for_backward({tokens, token_weight, position_weight});
    if (y.is_meta()) return y;
    const std::int64_t* index = tokens.data_ptr<std::int64_t>();
    const float *from = token_weight.data_ptr<float>(),
                *position =
                    ops::present(position_weight) ? position_weight.data_ptr<float>() : nullptr;
    float* to = y.data_ptr<float>();
    parallel_for(0, tokens.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const float* a = from + index[i] * width;
        if (position == nullptr) {
          std::copy(a, a + width, to + i * width);
          continue;
        }
        const float* b = position + i % length * width;
        for (std::int64_t j = 0; j < width; ++j) to[i * width + j] = a[j] + b[j];
      }
    });
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("token_position_embedding");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& tokens = saved[0];
    const at::Tensor dy = grads[0].contiguous();
    const std::int64_t length = tokens.size(1), width = dy.size(2);
    const ops::ParameterGrad dtoken(saved[1], ctx->needs_input_grad(1)),
        dposition(saved[2], ctx->needs_input_grad(2));
    if (dy.is_meta()) return {{}, dtoken.returned, dposition.returned};
    for (const ops::ParameterGrad* grad : {&dtoken, &dposition}) {
      if (grad->wanted() && !grad->accumulate) at::Tensor(grad->gradient).zero_();
    }
    const std::int64_t* index = tokens.data_ptr<std::int64_t>();
    const float* from = dy.data_ptr<float>();
    float* by_token = dtoken.wanted() ? dtoken.gradient.data_ptr<float>() : nullptr;
    float* by_position = dposition.wanted() ? dposition.gradient.data_ptr<float>() : nullptr;
    // Threads share the columns, not the rows: no two write to one place, and the order of each sum
    // is that of the tokens.
    constexpr std::int64_t kColumns = 32;
    parallel_for(
        0, (width + kColumns - 1) / kColumns, 1, [&](std::int64_t first, std::int64_t last) {
          const std::int64_t begin = first * kColumns, end = std::min(width, last * kColumns);
          for (std::int64_t i = 0; i < tokens.numel(); ++i) {
            const float* row = from + i * width;
            if (by_token != nullptr) {
              float* to = by_token + index[i] * width;
              for (std::int64_t j = begin; j < end; ++j) to[j] += row[j];
            }
            if (by_position != nullptr) {
              float* to = by_position + i % length * width;
              for (std::int64_t j = begin; j < end; ++j) to[j] += row[j];
            }
          }
        });
    return {{}, dtoken.returned, dposition.returned};
  }
};

}  // namespace

at::Tensor token_position_embedding(const at::Tensor& tokens, const at::Tensor& token_weight,
                                    const at::Tensor& position_weight) {
  if (tokens.dim() != 2)
    throw ConfigError(fmt::format("tokens have {} dimensions, but must be (B, T)", tokens.dim()));
  if (position_weight.defined() && tokens.size(1) > position_weight.size(0)) {
    throw ConfigError(fmt::format(
        "{} tokens in a row, but the model has {} positions: cut the text or raise block_size",
        tokens.size(1), position_weight.size(0)));
  }
  ops::check_range(tokens, token_weight.size(0), 0, "token");
  if (!ops::has_kernels(token_weight)) {
    const at::Tensor y = at::embedding(token_weight, tokens);
    return position_weight.defined() ? y + position_weight.narrow(0, 0, tokens.size(1)) : y;
  }
  return EmbeddingFunction::apply(tokens.contiguous(), token_weight.contiguous(),
                                  ops::or_empty(position_weight, token_weight));
}

}  // namespace headroom
