#include "ops/batch_norm.h"

#include "core/parallel.h"
#include "ops/graph_node.h"
#include "ops/kernels.h"
#include "ops/once.h"
#include "ops/passes.h"

#include <ATen/ATen.h>
#include <ATen/native/batch_norm.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using ops::KeptTensor;
using ops::maybe;
using ops::MaybeTensor;
using torch::autograd::variable_list;

struct Call {
  at::Tensor weight, bias, running_mean, running_var;  // each may be undefined
  double momentum = 0;
  double eps = 0;
  bool relu = false;
};

const float* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<float>() : nullptr;
}

// Of the layout that our kernels take, or not there.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.defined() ||
         ((tensor.is_cpu() || tensor.is_meta()) && tensor.scalar_type() == at::kFloat &&
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

kernels::ChannelScales scales_of(const Call& call, const at::Tensor& mean, const at::Tensor& rstd) {
  return {data(mean), data(rstd), data(call.weight), data(call.bias)};
}

BatchNormOutputs run_kernels(RunningSums sums, const at::Tensor& x, const Call& call) {
  const kernels::ChannelPlanes sizes = planes_of(x);
  const at::Tensor y = at::empty_like(x), mean = ops::make_floats({sizes.num_channels}, x),
                   rstd = ops::make_floats({sizes.num_channels}, x);
  if (x.is_meta()) return {y, mean, rstd};
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
    kernels::normalize_channels(from, sizes, scales_of(call, mean, rstd), call.relu,
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

using NormGradients = std::array<at::Tensor, 3>;  // of x, weight and bias

// By LibTorch's own kernel, whose elements are independent of each other: it may write over dy.
NormGradients run_backward_in_place(at::Tensor dy, const at::Tensor& x, const at::Tensor& weight,
                                    const at::Tensor& mean, const at::Tensor& rstd, double eps) {
  NormGradients gradients{dy, ops::make_floats({x.size(1)}, x), ops::make_floats({x.size(1)}, x)};
  if (x.is_meta()) return gradients;
  const at::Tensor none;  // running statistics
  at::native::batch_norm_cpu_backward_stub(at::kCPU, gradients[0], gradients[1], gradients[2], dy,
                                           x, weight, none, none, mean, rstd, /*train=*/true, eps);
  return gradients;
}

NormGradients run_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& mean, const at::Tensor& rstd, double eps,
                           std::array<bool, 3> wanted) {
  auto [dx, dweight, dbias] =
      at::native_batch_norm_backward(dy, x, maybe(weight), {}, {}, mean, rstd, true, eps, wanted);
  return {dx, dweight, dbias};
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
                      1e-5,
                      false};
    Call ours = theirs;
    ours.running_mean = theirs.running_mean.clone();
    ours.running_var = theirs.running_var.clone();
    const BatchNormOutputs expected = run_libtorch(x, theirs), given = run_kernels(sums, x, ours);
    const at::Tensor dy = make(sizes);
    const NormGradients gradients = run_backward(dy, x, theirs.weight, expected.mean, expected.rstd,
                                                 theirs.eps, {true, true, true});
    const NormGradients in_place =
        run_backward_in_place(dy, x, theirs.weight, expected.mean, expected.rstd, theirs.eps);
    const std::pair<at::Tensor, at::Tensor> pairs[] = {{expected.y, given.y},
                                                       {expected.mean, given.mean},
                                                       {expected.rstd, given.rstd},
                                                       {theirs.running_mean, ours.running_mean},
                                                       {theirs.running_var, ours.running_var},
                                                       {gradients[0], in_place[0]},
                                                       {gradients[1], in_place[1]},
                                                       {gradients[2], in_place[2]}};
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

// y again from what forward gave, by our kernels.
at::Tensor normalize_again(const at::Tensor& x, const Call& call, const at::Tensor& mean,
                           const at::Tensor& rstd) {
  at::Tensor y = at::empty_like(x);
  if (x.is_meta()) return y;
  const kernels::ChannelPlanes sizes = planes_of(x);
  for_channels(sizes, [&](std::int64_t begin, std::int64_t end) {
    kernels::normalize_channels(data(x), sizes, scales_of(call, mean, rstd), call.relu,
                                y.data_ptr<float>(), begin, end);
  });
  return y;
}

// Whether the samples of dy are whole, though there may be something between them, as in a part of
// the gradient of a concatenation.
bool has_whole_samples(const at::Tensor& dy) {
  return (dy.is_cpu() || dy.is_meta()) && dy.scalar_type() == at::kFloat &&
         dy.layout() == at::kStrided && dy.select(0, 0).is_contiguous() &&
         dy.stride(0) >= dy.numel() / dy.size(0);
}

// dy where the positive part has a derivative, written over dy where nobody else holds it.
at::Tensor masked(at::Tensor dy, const at::Tensor& x, const Call& call, const at::Tensor& mean,
                  const at::Tensor& rstd) {
  // Others get the layout that LibTorch gives them, which sums depend on.
  if (!has_whole_samples(dy))
    return at::threshold_backward(dy, normalize_again(x, call, mean, rstd), 0);
  const bool is_in_place = dy.is_contiguous() && ops::is_owned_alone(dy);
  at::Tensor to = is_in_place ? dy : at::empty(dy.sizes(), dy.options());
  if (x.is_meta()) return to;
  const kernels::ChannelPlanes sizes = planes_of(x);
  for_channels(sizes, [&](std::int64_t begin, std::int64_t end) {
    kernels::mask_channels(data(x), sizes, scales_of(call, mean, rstd), data(dy), dy.stride(0),
                           to.data_ptr<float>(), begin, end);
  });
  return to;
}

class BatchNormNode final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) override {
    ops::check_differentiated_once("a batch norm");
    at::Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return variable_list(3);
    const at::Tensor x = x_.take();
    Call call;
    call.weight = weight_.get();
    call.bias = bias_.get();
    call.relu = relu_;
    if (relu_) dy = masked(std::move(dy), x, call, mean_, rstd_);
    const std::array<bool, 3> wanted{task_should_compute_output(0), task_should_compute_output(1),
                                     task_should_compute_output(2)};
    const bool is_in_place = is_ours_ && wanted[0] && is_plain(dy) && ops::is_owned_alone(dy);
    const NormGradients gradients =
        is_in_place ? run_backward_in_place(std::move(dy), x, call.weight, mean_, rstd_, eps_)
                    : run_backward(dy, x, call.weight, mean_, rstd_, eps_, wanted);
    variable_list result(3);
    for (std::size_t i = 0; i < result.size(); ++i) {
      if (wanted[i]) result[i] = gradients[i];
    }
    return result;
  }

  void release_variables() override {
    for (KeptTensor* kept : {&x_, &weight_, &bias_}) kept->release();
    mean_ = rstd_ = at::Tensor();
  }

  std::string name() const override { return "BatchNormBackward"; }

  void keep(const at::Tensor& x, const Call& call, const BatchNormOutputs& outputs, bool is_ours) {
    x_ = KeptTensor(x);
    weight_ = KeptTensor(call.weight);
    bias_ = KeptTensor(call.relu ? call.bias : at::Tensor());
    mean_ = outputs.mean;
    rstd_ = outputs.rstd;
    eps_ = call.eps;
    relu_ = call.relu;
    is_ours_ = is_ours;
  }

 private:
  KeptTensor x_, weight_, bias_;
  at::Tensor mean_, rstd_;  // exactly: what is computed from rounded ones would differ everywhere
  double eps_ = 0;
  bool relu_ = false;
  bool is_ours_ = false;  // of a layout and on a CPU for which kernels were tried
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_operator(
    const at::Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& running_mean, const MaybeTensor& running_var, double momentum, double eps,
    bool relu) {
  if (ops::is_autocast(x)) {  // whose rules for types are LibTorch's
    at::Tensor y =
        at::batch_norm(x, weight, bias, running_mean, running_var, true, momentum, eps, false);
    return {relu ? y.relu_() : y, {}, {}};
  }
  Call call;
  call.weight = weight.value_or(at::Tensor());
  call.bias = bias.value_or(at::Tensor());
  call.running_mean = running_mean.value_or(at::Tensor());
  call.running_var = running_var.value_or(at::Tensor());
  call.momentum = momentum;
  call.eps = eps;
  const bool is_ours = suits_kernels(x, call);
  call.relu = is_ours && relu;
  const auto node = ops::make_node_for<BatchNormNode>({x, call.weight, call.bias});
  BatchNormOutputs outputs;
  at::Tensor y = ops::with_history(node, [&] {
    outputs = is_ours ? run_kernels(*reproduced(), x, call) : run_libtorch(x, call);
    return std::move(outputs.y);
  });
  if (node) node->keep(x, call, outputs, is_ours);
  if (relu && !call.relu) y.relu_();
  return {y, outputs.mean, outputs.rstd};
}

at::Tensor batch_norm_again_operator(const at::Tensor& x, const MaybeTensor& weight,
                                     const MaybeTensor& bias, const MaybeTensor& running_mean,
                                     const MaybeTensor& running_var, const at::Tensor& mean,
                                     const at::Tensor& rstd, double eps, bool relu) {
  const at::Tensor none;
  return batch_norm_again(x, weight.value_or(none), bias.value_or(none),
                          running_mean.value_or(none), running_var.value_or(none), mean, rstd, eps,
                          relu);
}

// As operators they are seen by whoever watches operators, such as what undoes writes to buffers.
TORCH_LIBRARY(headroom, library) {
  library.def(
      "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, float momentum, float eps, bool relu) -> (Tensor, Tensor, Tensor)",
      batch_norm_operator);
  library.def(
      "batch_norm_again(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, Tensor mean, Tensor rstd, float eps, bool relu) -> Tensor",
      batch_norm_again_operator);
}

}  // namespace

BatchNormOutputs batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            double momentum, double eps, bool relu) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("headroom::batch_norm", "")
                                 .typed<decltype(batch_norm_operator)>();
  auto [y, mean, rstd] = handle.call(x, maybe(weight), maybe(bias), maybe(running_mean),
                                     maybe(running_var), momentum, eps, relu);
  return {y, mean, rstd};
}

at::Tensor batch_norm_again(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& running_mean, const at::Tensor& running_var,
                            const at::Tensor& mean, const at::Tensor& rstd, double eps, bool relu) {
  const at::NoGradGuard no_grad;
  Call call{weight, bias, running_mean, running_var, 0.0, eps, relu};
  if (suits_kernels(x, call)) return normalize_again(x, call, mean, rstd);
  call.running_mean = call.running_var = at::Tensor();
  at::Tensor y = run_libtorch(x, call).y;
  return relu ? y.relu_() : y;
}

bool reproduces_batch_norm() { return reproduced().has_value(); }

}  // namespace headroom
