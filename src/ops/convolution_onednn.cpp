#include "ops/convolution.h"

#include "core/torch_compat.h"
#include "ops/onednn_layouts.h"

#include <ATen/ATen.h>
#include <ATen/native/ConvUtils.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace headroom::ops {
namespace {

using dnnl::memory;

struct Shapes {
  std::vector<std::int64_t> x, weight, y;
};

std::vector<std::int64_t> sizes_of_y(at::IntArrayRef x, at::IntArrayRef weight,
                                     const Window& window) {
  return at::native::conv_output_size(x, weight, window.padding, window.stride, window.dilation);
}

// Weights as oneDNN has them: (groups, O / groups, C / groups, h, w) where there are groups.
std::vector<std::int64_t> grouped(const std::vector<std::int64_t>& weight, std::int64_t groups) {
  std::vector<std::int64_t> sizes(weight);
  if (groups == 1) return sizes;
  sizes[0] /= groups;
  sizes.insert(sizes.begin(), groups);
  return sizes;
}

// Asks for primitives as LibTorch does: every layout is oneDNN's choice.
class Primitives {
 public:
  Primitives(const Shapes& shapes, const Window& window, bool has_bias)
      : x_(any_layout(shapes.x)),
        weight_(any_layout(grouped(shapes.weight, window.groups))),
        y_(any_layout(shapes.y)),
        bias_(has_bias ? any_layout({shapes.y[1]}) : memory::desc()),
        stride_(window.stride),
        padding_(window.padding) {
    for (const std::int64_t dilation : window.dilation) dilation_.push_back(dilation - 1);
    attributes_.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  }

#if DNNL_VERSION_MAJOR >= 3
  dnnl::convolution_forward::primitive_desc forward() const {
    return {cpu_engine(), dnnl::prop_kind::forward_training,
            kAlgorithm,   x_,
            weight_,      bias_,
            y_,           stride_,
            dilation_,    padding_,
            padding_,     attributes_};
  }
  dnnl::convolution_backward_weights::primitive_desc backward_weights() const {
    return {cpu_engine(), kAlgorithm, x_,       weight_,  bias_,     y_,
            stride_,      dilation_,  padding_, padding_, forward(), attributes_};
  }
  dnnl::convolution_backward_data::primitive_desc backward_data() const {
    return {cpu_engine(), kAlgorithm, x_,       weight_,   y_,         stride_,
            dilation_,    padding_,   padding_, forward(), attributes_};
  }
#else
  dnnl::convolution_forward::primitive_desc forward() const {
    return {{dnnl::prop_kind::forward_training, kAlgorithm, x_, weight_, bias_, y_, stride_,
             dilation_, padding_, padding_},
            attributes_,
            cpu_engine()};
  }
  dnnl::convolution_backward_weights::primitive_desc backward_weights() const {
    return {{kAlgorithm, x_, weight_, bias_, y_, stride_, dilation_, padding_, padding_},
            attributes_,
            cpu_engine(),
            forward()};
  }
  dnnl::convolution_backward_data::primitive_desc backward_data() const {
    return {{kAlgorithm, x_, weight_, y_, stride_, dilation_, padding_, padding_},
            attributes_,
            cpu_engine(),
            forward()};
  }
#endif

 private:
  static constexpr dnnl::algorithm kAlgorithm = dnnl::algorithm::convolution_direct;

  memory::desc x_, weight_, y_, bias_;
  memory::dims stride_, dilation_, padding_;
  dnnl::primitive_attr attributes_;
};

Laid usual(const at::Tensor& tensor) { return {tensor, usual_layout(tensor.sizes().vec())}; }

Laid usual_weight(const at::Tensor& weight, const Window& window) {
  return {weight, usual_layout(grouped(weight.sizes().vec(), window.groups))};
}

void fill_weight_gradients(const dnnl::convolution_backward_weights::primitive_desc& primitive,
                           const Laid& dy, const Laid& x, const Window& window,
                           ConvolutionGradients& gradients) {
  using Weights = dnnl::convolution_backward_weights;
  Arguments arguments{{DNNL_ARG_SRC, x}, {DNNL_ARG_DIFF_DST, dy}};
  if (gradients[2].defined())
    arguments.push_back({DNNL_ARG_DIFF_BIAS, {gradients[2], primitive.diff_bias_desc()}});
  const Laid wanted = usual_weight(gradients[1], window);
  const memory::desc given = primitive.diff_weights_desc();
  const Laid made{given == wanted.desc ? wanted.tensor : space_for(given, wanted.tensor), given};
  arguments.push_back({DNNL_ARG_DIFF_WEIGHTS, made});
  run_primitive<Weights>(primitive, arguments);
  if (given != wanted.desc) reorder(made, wanted);
}

// ---- Whether the bits are LibTorch's.

bool is_usual(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_meta()) && tensor.scalar_type() == at::kFloat &&
         tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         tensor.suggest_memory_format() == at::MemoryFormat::Contiguous;
}

// On the meta device LibTorch has one way for all convolutions; there it is as on the CPU.
bool is_run_by_onednn(const at::Tensor& x, const at::Tensor& weight, const Window& window) {
  const auto on_cpu = [](const at::Tensor& tensor) {
    return tensor.is_cpu()
               ? tensor
               : at::empty({1}, tensor.options().device(at::kCPU)).expand(tensor.sizes());
  };
#if HEADROOM_TORCH_AT_LEAST(2, 0)
  const auto numbers = [](const std::vector<std::int64_t>& values) {
    return std::vector<c10::SymInt>(values.begin(), values.end());
  };
  return at::native::select_conv_backend(
             on_cpu(x), on_cpu(weight), c10::nullopt, numbers(window.stride),
             numbers(window.padding), numbers(window.dilation), false,
             numbers(window.output_padding()), window.groups) == at::native::ConvBackend::Mkldnn;
#else
  return at::native::select_conv_backend(on_cpu(x), on_cpu(weight), c10::nullopt, window.stride,
                                         window.padding, window.dilation, false,
                                         window.output_padding(),
                                         window.groups) == at::native::ConvBackend::Mkldnn;
#endif
}

// Numbers that any generator would do for.
at::Tensor make_numbers(at::IntArrayRef sizes, std::uint32_t& state) {
  const at::Tensor tensor = at::empty(sizes, at::kFloat);
  float* values = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return tensor;
}

struct Trial {
  std::vector<std::int64_t> x, weight;
  Window window;
};

bool reproduces(const Trial& trial, std::uint32_t& state) {
  const auto& [stride, padding, dilation, groups] = trial.window;
  const at::Tensor x = make_numbers(trial.x, state), weight = make_numbers(trial.weight, state),
                   bias = make_numbers({trial.weight[0]}, state);
  if (!is_run_by_onednn(x, weight, trial.window)) return false;
  const at::Tensor y = at::convolution(x, weight, bias, stride, padding, dilation, false,
                                       trial.window.output_padding(), groups);
  const at::Tensor dy = make_numbers(y.sizes(), state);
  const auto [dx, dweight, dbias] =
      at::convolution_backward(dy, x, weight, bias.sizes(), stride, padding, dilation, false,
                               trial.window.output_padding(), groups, {true, true, true});
  const ConvolutionGradients ours =
      convolve_backward(dy, x, weight, trial.window, {true, true, true});
  return convolve(x, weight, bias, trial.window).equal(y) && ours[0].equal(dx) &&
         ours[1].equal(dweight) && ours[2].equal(dbias);
}

bool reproduces_libtorch() {
  static const bool reproduced = [] {
    const at::NoGradGuard no_grad;
    std::uint32_t state = 1;
    const std::vector<Trial> trials{{{2, 3, 14, 14}, {16, 3, 3, 3}, {{1, 1}, {1, 1}, {1, 1}, 1}},
                                    {{16, 32, 5, 5}, {48, 32, 1, 1}, {{1, 1}, {0, 0}, {1, 1}, 1}},
                                    {{2, 32, 11, 10}, {32, 32, 3, 3}, {{2, 2}, {1, 1}, {1, 1}, 1}},
                                    {{2, 32, 12, 12}, {32, 1, 5, 5}, {{1, 1}, {2, 2}, {1, 1}, 32}},
                                    {{2, 16, 12, 12}, {24, 8, 3, 3}, {{1, 1}, {2, 2}, {2, 2}, 2}}};
    try {
      return std::all_of(trials.begin(), trials.end(),
                         [&](const Trial& trial) { return reproduces(trial, state); });
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return reproduced;
}

}  // namespace

bool has_lean_convolution(const at::Tensor& x, const at::Tensor& weight, const Window& window) {
  return x.dim() == 4 && weight.dim() == 4 && is_usual(x) && is_usual(weight) && x.numel() > 0 &&
         is_run_by_onednn(x, weight, window) && reproduces_libtorch();
}

at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                    const Window& window) {
  const Shapes shapes{x.sizes().vec(), weight.sizes().vec(),
                      sizes_of_y(x.sizes(), weight.sizes(), window)};
  const auto primitive = Primitives(shapes, window, bias.defined()).forward();
  const Laid laid_weight = in_layout(usual_weight(weight, window), primitive.weights_desc(),
                                     grouped(shapes.weight, window.groups));
  Laid laid_x = in_layout(usual(x), primitive.src_desc(), shapes.x);
  return in_usual_layout(primitive.dst_desc(), shapes.y, x.options(), [&](const Laid& y) {
    Arguments arguments{
        {DNNL_ARG_SRC, std::move(laid_x)}, {DNNL_ARG_WEIGHTS, laid_weight}, {DNNL_ARG_DST, y}};
    if (bias.defined()) arguments.push_back({DNNL_ARG_BIAS, {bias, primitive.bias_desc()}});
    run_primitive<dnnl::convolution_forward>(primitive, arguments);
  });
}

ConvolutionGradients convolve_backward(at::Tensor dy, at::Tensor x, const at::Tensor& weight,
                                       const Window& window, std::array<bool, 3> wanted) {
  const auto [wants_x, wants_weight, wants_bias] = wanted;
  const Shapes shapes{x.sizes().vec(), weight.sizes().vec(), dy.sizes().vec()};
  const Primitives primitives(shapes, window, wants_bias);
  dy = dy.contiguous();
  Laid laid_dy{std::move(dy), usual_layout(shapes.y)};
  ConvolutionGradients gradients;
  if (wants_weight || wants_bias) {
    const auto primitive = primitives.backward_weights();
    gradients[1] = at::empty(shapes.weight, weight.options());
    if (wants_bias) gradients[2] = at::empty({shapes.weight[0]}, weight.options());
    laid_dy = in_layout(std::move(laid_dy), primitive.diff_dst_desc(), shapes.y);
    Laid laid_x{std::move(x), usual_layout(shapes.x)};
    laid_x = in_layout(std::move(laid_x), primitive.src_desc(), shapes.x);
    fill_weight_gradients(primitive, laid_dy, laid_x, window, gradients);
    if (!wants_weight) gradients[1] = at::Tensor();
  }
  x.reset();
  if (!wants_x) return gradients;
  const auto primitive = primitives.backward_data();
  const Laid laid_weight = in_layout(usual_weight(weight, window), primitive.weights_desc(),
                                     grouped(shapes.weight, window.groups));
  laid_dy = in_layout(std::move(laid_dy), primitive.diff_dst_desc(), shapes.y);
  gradients[0] =
      in_usual_layout(primitive.diff_src_desc(), shapes.x, weight.options(), [&](const Laid& dx) {
        run_primitive<dnnl::convolution_backward_data>(primitive,
                                                       {{DNNL_ARG_DIFF_DST, std::move(laid_dy)},
                                                        {DNNL_ARG_WEIGHTS, laid_weight},
                                                        {DNNL_ARG_DIFF_SRC, dx}});
      });
  return gradients;
}

}  // namespace headroom::ops
