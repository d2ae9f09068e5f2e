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

// y (B, T, C) = the rows of the tokens, plus those of their positions.
template <class T>
void look_up(const at::Tensor& tokens, const at::Tensor& token_weight,
             const at::Tensor& position_weight, const at::Tensor& y) {
  const std::int64_t length = y.size(1), width = y.size(2);
  const std::int64_t* index = tokens.data_ptr<std::int64_t>();
  const float *from = token_weight.data_ptr<float>(),
              *position =
                  ops::present(position_weight) ? position_weight.data_ptr<float>() : nullptr;
  T* to = y.data_ptr<T>();
  parallel_for(0, tokens.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const float* a = from + index[i] * width;
      if (position == nullptr) {
        std::copy(a, a + width, to + i * width);
        continue;
      }
      const float* b = position + i % length * width;
      for (std::int64_t j = 0; j < width; ++j) to[i * width + j] = static_cast<T>(a[j] + b[j]);
    }
  });
}

// Adds the rows of dy to those of their tokens and positions. Threads share the columns, not the
// rows: no two write to one place, and the order of each sum is that of the tokens.
template <class T>
void add_gradients(const at::Tensor& tokens, const at::Tensor& dy, const ops::ParameterGrad& dtoken,
                   const ops::ParameterGrad& dposition) {
  const std::int64_t length = tokens.size(1), width = dy.size(2);
  const std::int64_t* index = tokens.data_ptr<std::int64_t>();
  const T* from = dy.data_ptr<T>();
  float* by_token = dtoken.wanted() ? dtoken.gradient.data_ptr<float>() : nullptr;
  float* by_position = dposition.wanted() ? dposition.gradient.data_ptr<float>() : nullptr;
  constexpr std::int64_t kColumns = 32;
  parallel_for(0, (width + kColumns - 1) / kColumns, 1, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t begin = first * kColumns, end = std::min(width, last * kColumns);
    for (std::int64_t i = 0; i < tokens.numel(); ++i) {
      const T* row = from + i * width;
      if (by_token != nullptr) {
        float* to = by_token + index[i] * width;
        for (std::int64_t j = begin; j < end; ++j) to[j] += static_cast<float>(row[j]);
      }
      if (by_position != nullptr) {
        float* to = by_position + i % length * width;
        for (std::int64_t j = begin; j < end; ++j) to[j] += static_cast<float>(row[j]);
      }
    }
  });
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tokens,
                            const at::Tensor& token_weight, const at::Tensor& position_weight) {
    const bool is_half = ops::is_autocast(token_weight);
    at::Tensor y = at::empty(
        {tokens.size(0), tokens.size(1), token_weight.size(1)},
        token_weight.options().dtype(is_half ? at::kBFloat16 : at::kFloat).requires_grad(false));
    ctx->save_for_backward({tokens, token_weight, position_weight});
    if (y.is_meta()) return y;
    if (is_half) {
      look_up<c10::BFloat16>(tokens, token_weight, position_weight, y);
    } else {
      look_up<float>(tokens, token_weight, position_weight, y);
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("token_position_embedding");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor dy = grads[0].contiguous();
    const ops::ParameterGrad dtoken(saved[1], ctx->needs_input_grad(1)),
        dposition(saved[2], ctx->needs_input_grad(2));
    if (dy.is_meta()) return {{}, dtoken.returned, dposition.returned};
    for (const ops::ParameterGrad* grad : {&dtoken, &dposition}) {
      if (grad->wanted() && !grad->accumulate) at::Tensor(grad->gradient).zero_();
    }
    if (dy.scalar_type() == at::kBFloat16) {
      add_gradients<c10::BFloat16>(saved[0], dy, dtoken, dposition);
    } else {
      add_gradients<float>(saved[0], dy, dtoken, dposition);
    }
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
