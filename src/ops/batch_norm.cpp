#include "ops/batch_norm.h"

#include "core/parallel.h"
#include "ops/kernels.h"
#include "ops/once.h"
#include "ops/passes.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

namespace headroom {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = c10::optional<at::Tensor>;

struct Call {
  at::Tensor weight, bias, running_mean, running_var;  // each may be undefined
  double momentum = 0;
  double eps = 0;
};

at::Tensor defined_or_none(const at::Tensor& tensor) {
  return ops::present(tensor) ? tensor : at::Tensor();
}

MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor();
}

const float* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<float>() : nullptr;
}

// Of the layout that our kernels take, or not there.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.defined() || (tensor.is_cpu() && tensor.scalar_type() == at::kFloat &&
                               tensor.layout() == at::kStrided && tensor.is_contiguous());
}

kernels::ChannelPlanes planes_of(const at::Tensor& x) {
  return {x.size(0), x.size(1), x.numel() / (x.size(0) * x.size(1))};
}

// Where LibTorch takes one plane after the other. A plane of one element it takes for the other
// layout, whose sums have another order.
bool has_planes(const at::Tensor& x) {
  return is_plain(x) && x.dim() >= 3 && x.numel() > 0 && planes_of(x).plane > 1;
}

// Channels of one part: what the kernel sums side by side, so that its elements are still in the
// cache when they are scaled.
constexpr std::int64_t kChannels = 8;

template <class Body>
void for_channels(const kernels::ChannelPlanes& sizes, const Body& body) {
  const std::int64_t num_parts = (sizes.num_channels + kChannels - 1) / kChannels;
  parallel_for(0, num_parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part)
      body(part * kChannels, std::min((part + 1) * kChannels, sizes.num_channels));
  });
}

// How LibTorch adds to running statistics: a fact of its version.
enum class RunningSums {
  kFloatMomentum,   // 1.13: the momentum is a float, and so are products of floats with it
  kDoubleMomentum,  // later
};

float moved_mean(RunningSums sums, double momentum, float running, float mean) {
  if (sums == RunningSums::kDoubleMomentum)
    return static_cast<float>(momentum * mean + (1 - momentum) * running);
  const float rounded = static_cast<float>(momentum);
  return rounded * mean + (1 - rounded) * running;
}

float moved_variance(RunningSums sums, double momentum, float running, double variance) {
  if (sums == RunningSums::kDoubleMomentum)
    return static_cast<float>(momentum * variance + (1 - momentum) * running);
  const float rounded = static_cast<float>(momentum);
  const float rest = (1 - rounded) * running;
  return static_cast<float>(rounded * variance + rest);
}

// 1 / sqrt(variance + eps), and the running statistics, of one channel.
float finish_statistics(RunningSums sums, const Call& call, float mean, float square_sum,
                        std::int64_t count, std::int64_t channel) {
  if (call.running_mean.defined()) {
    float& running = call.running_mean.data_ptr<float>()[channel];
    running = moved_mean(sums, call.momentum, running, mean);
  }
  if (call.running_var.defined()) {
    float& running = call.running_var.data_ptr<float>()[channel];
    running =
        moved_variance(sums, call.momentum, running, square_sum / static_cast<float>(count - 1));
  }
  const double variance = square_sum / static_cast<float>(count);
  const bool is_constant = variance == 0.0 && call.eps == 0.0;
  return is_constant ? 0.0f : static_cast<float>(1.0 / std::sqrt(variance + call.eps));
}

BatchNormOutputs run_kernels(RunningSums sums, const at::Tensor& x, const Call& call) {
  const kernels::ChannelPlanes sizes = planes_of(x);
  const at::Tensor y = at::empty_like(x), mean = ops::make_floats({sizes.num_channels}, x),
                   rstd = ops::make_floats({sizes.num_channels}, x);
  const float* from = x.data_ptr<float>();
  float *means = mean.data_ptr<float>(), *rstds = rstd.data_ptr<float>();
  std::vector<float> square_sums(static_cast<std::size_t>(sizes.num_channels));
  const std::int64_t count = sizes.num_samples * sizes.plane;
  for_channels(sizes, [&](std::int64_t begin, std::int64_t end) {
    kernels::channel_statistics(from, sizes, means, square_sums.data(), begin, end);
    for (std::int64_t c = begin; c < end; ++c) {
      rstds[c] = finish_statistics(sums, call, means[c], square_sums[static_cast<std::size_t>(c)],
                                   count, c);
    }
    kernels::normalize_channels(from, sizes, means, rstds, data(call.weight), data(call.bias),
                                y.data_ptr<float>(), begin, end);
  });
  return {y, mean, rstd};
}

BatchNormOutputs run_libtorch(const at::Tensor& x, const Call& call) {
  auto [y, mean, rstd] =
      at::native_batch_norm(x, maybe(call.weight), maybe(call.bias), maybe(call.running_mean),
                            maybe(call.running_var), true, call.momentum, call.eps);
  return {y, mean, rstd};
}

// Whether kernels and rule give LibTorch's bits, tried on numbers that any generator would do for.
bool reproduces(RunningSums sums) {
  const at::NoGradGuard no_grad;
  std::uint32_t bits = 1;
  const auto make = [&](at::IntArrayRef sizes) {
    const at::Tensor tensor = at::empty(sizes, at::kFloat);
    float* values = tensor.data_ptr<float>();
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      bits = bits * 1664525u + 1013904223u;
      values[i] = static_cast<float>(bits >> 8) / 8388608.0f + 0.25f;
    }
    return tensor;
  };
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>{3, 11, 5, 7}, {2, 3, 67}, {1, 17, 4, 4, 4}}) {
    const std::int64_t num_channels = sizes[1];
    const at::Tensor x = make(sizes);
    const Call theirs{make({num_channels}),
                      make({num_channels}),
                      make({num_channels}),
                      make({num_channels}),
                      0.1,
                      1e-5};
    Call ours = theirs;
    ours.running_mean = theirs.running_mean.clone();
    ours.running_var = theirs.running_var.clone();
    const BatchNormOutputs expected = run_libtorch(x, theirs), given = run_kernels(sums, x, ours);
    const std::pair<at::Tensor, at::Tensor> pairs[] = {{expected.y, given.y},
                                                       {expected.mean, given.mean},
                                                       {expected.rstd, given.rstd},
                                                       {theirs.running_mean, ours.running_mean},
                                                       {theirs.running_var, ours.running_var}};
    for (const auto& [one, other] : pairs) {
      if (!one.equal(other)) return false;
    }
  }
  return true;
}

// Nothing: LibTorch on this CPU computes in another way.
const std::optional<RunningSums>& reproduced() {
  static const std::optional<RunningSums> found = []() -> std::optional<RunningSums> {
    for (const RunningSums sums : {RunningSums::kFloatMomentum, RunningSums::kDoubleMomentum}) {
      if (reproduces(sums)) return sums;
    }
    return std::nullopt;
  }();
  return found;
}

bool suits_kernels(const at::Tensor& x, const Call& call) {
  return has_planes(x) && is_plain(call.weight) && is_plain(call.bias) &&
         is_plain(call.running_mean) && is_plain(call.running_var) && reproduced();
}

struct BatchNormFunction : torch::autograd::Function<BatchNormFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, Call call) {
    call.weight = defined_or_none(weight);
    call.bias = defined_or_none(bias);
    const BatchNormOutputs outputs =
        suits_kernels(x, call) ? run_kernels(*reproduced(), x, call) : run_libtorch(x, call);
    ctx->save_for_backward({x, weight});
    ops::keep_exact(ctx->saved_data, "mean", outputs.mean);
    ops::keep_exact(ctx->saved_data, "rstd", outputs.rstd);
    ctx->saved_data["eps"] = call.eps;
    ctx->mark_non_differentiable({outputs.mean, outputs.rstd});
    ctx->set_materialize_grads(false);
    return {outputs.y, outputs.mean, outputs.rstd};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    ops::check_differentiated_once("a batch norm");
    const at::Tensor& dy = grads[0];
    if (!dy.defined()) return {{}, {}, {}, {}};
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight, dbias] = at::native_batch_norm_backward(
        dy, saved[0], maybe(defined_or_none(saved[1])), {}, {},
        ops::take_exact(ctx->saved_data, "mean"), ops::take_exact(ctx->saved_data, "rstd"), true,
        ctx->saved_data["eps"].toDouble(),
        {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)});
    return {dx, dweight, dbias, {}};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_operator(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum, double eps) {
  if (ops::is_autocast(x)) {  // whose rules for types are LibTorch's
    return {at::batch_norm(x, weight, bias, running_mean, running_var, true, momentum, eps, false),
            {},
            {}};
  }
  Call call;
  call.running_mean = running_mean.value_or(at::Tensor());
  call.running_var = running_var.value_or(at::Tensor());
  call.momentum = momentum;
  call.eps = eps;
  const at::Tensor none = at::empty({0}, x.options());  // a function takes no undefined one
  const variable_list outputs =
      BatchNormFunction::apply(x, weight.value_or(none), bias.value_or(none), call);
  return {outputs[0], outputs[1], outputs[2]};
}

at::Tensor batch_norm_again_operator(const at::Tensor& x, const MaybeTensor& weight,
                                     const MaybeTensor& bias, const MaybeTensor& running_mean,
                                     const MaybeTensor& running_var, const at::Tensor& mean,
                                     const at::Tensor& rstd, double eps) {
  const at::Tensor none;
  return batch_norm_again(x, weight.value_or(none), bias.value_or(none),
                          running_mean.value_or(none), running_var.value_or(none), mean, rstd, eps);
}

// As operators they are seen by whoever watches operators, such as what undoes writes to buffers.
TORCH_LIBRARY(headroom, library) {
  library.def(
      "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)",
      batch_norm_operator);
  library.def(
      "batch_norm_again(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, Tensor mean, Tensor rstd, float eps) -> Tensor",
      batch_norm_again_operator);
}

}  // namespace

BatchNormOutputs batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            double momentum, double eps) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("headroom::batch_norm", "")
                                 .typed<decltype(batch_norm_operator)>();
  auto [y, mean, rstd] = handle.call(x, maybe(weight), maybe(bias), maybe(running_mean),
                                     maybe(running_var), momentum, eps);
  return {y, mean, rstd};
}

at::Tensor batch_norm_again(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            const at::Tensor& mean, const at::Tensor& rstd, double eps) {
  const at::NoGradGuard no_grad;
  if (!suits_kernels(x, {weight, bias, running_mean, running_var}))
    return run_libtorch(x, {weight, bias, {}, {}, 0.0, eps}).y;
  const kernels::ChannelPlanes sizes = planes_of(x);
  at::Tensor y = at::empty_like(x);
  for_channels(sizes, [&](std::int64_t begin, std::int64_t end) {
    kernels::normalize_channels(data(x), sizes, data(mean), data(rstd), data(weight), data(bias),
                                y.data_ptr<float>(), begin, end);
  });
  return y;
}

bool reproduces_batch_norm() { return reproduced().has_value(); }

}  // namespace headroom
