// Most kernels of the CPU allocate their results and nothing else. Convolutions and norms also need
// scratch memory, whose size only the library that runs them knows: they are asked by running them
// alone, on no more samples than fit into a little memory.
#include "memory/shape_kernels.h"

#include <headroom/memory/meter.h>
#include "memory/shape_meter.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = c10::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;

bool is_given(const MaybeTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// ---- Scratch memory.

thread_local bool may_run_kernels = true;

/// Makes inputs for so many samples and returns what runs the operator on them.
using Probe = std::function<std::function<void()>(std::int64_t num_samples)>;

// The most bytes that the operator holds at once, its results included.
std::int64_t measure_peak(const Probe& probe, std::int64_t num_samples) {
  MemoryMeter& meter = MemoryMeter::instance();
  const OwnerScope owner(Owner::kOther);
  const std::function<void()> run = probe(num_samples);
  run();  // the first run of a shape pays for setting up kernels
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  run();
  return meter.peak_bytes() - before;
}

// As many samples as make 64 MiB are run; more are on the line through that number and half of it,
// or a little above: how a library shares the samples among threads, and rounds its buffers up, is
// not quite a line.
std::int64_t peak_bytes(const std::string& key, std::int64_t num_samples, std::int64_t total_bytes,
                        const Probe& probe) {
  TORCH_CHECK(may_run_kernels, "the scratch memory of an operator is known only by running it");
  constexpr std::int64_t kMostBytes = std::int64_t{64} << 20, kFewestSamples = 8;
  static std::mutex mutex;
  static std::map<std::string, std::int64_t> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto peak_of = [&](std::int64_t size) {
    const std::string full =
        fmt::format("{} threads {} samples {}", key, at::get_num_threads(), size);
    const auto found = known.find(full);
    return found != known.end() ? found->second : known[full] = measure_peak(probe, size);
  };
  const std::int64_t sample_bytes =
      std::max<std::int64_t>(1, total_bytes / std::max<std::int64_t>(1, num_samples));
  const std::int64_t most = std::max(kFewestSamples, kMostBytes / sample_bytes);
  if (num_samples <= most) return peak_of(num_samples);
  const std::int64_t low = peak_of(most / 2), high = peak_of(most);
  const std::int64_t on_line = high + (num_samples - most) * (high - low) / (most - most / 2);
  return on_line + on_line / 100 + 1024;
}

std::int64_t bytes_of(std::initializer_list<Tensor> tensors) {
  std::int64_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

// Holds, for a moment, what the operator needs beyond its results.
void touch_scratch(std::int64_t operator_peak_bytes, std::initializer_list<Tensor> results) {
  for (const Tensor& result : results) {
    if (result.defined()) operator_peak_bytes -= static_cast<std::int64_t>(result.nbytes());
  }
  if (operator_peak_bytes > 0)
    at::empty({operator_peak_bytes}, at::TensorOptions().dtype(at::kByte).device(at::kMeta));
}

Tensor sample(const Tensor& like, std::int64_t num_samples) {
  std::vector<std::int64_t> sizes = like.sizes().vec();
  sizes[0] = num_samples;
  return at::zeros(sizes, like.options().device(at::kCPU).requires_grad(false));
}

Tensor whole(const Tensor& like) {
  return at::zeros(like.sizes(), like.options().device(at::kCPU).requires_grad(false));
}
MaybeTensor whole(const MaybeTensor& like) {
  return is_given(like) ? MaybeTensor(whole(*like)) : MaybeTensor();
}

Tensor floats(IntArrayRef sizes, const Tensor& like) {
  return at::empty(sizes, like.options().requires_grad(false));
}

// ---- Convolution.

struct Convolution {
  std::vector<std::int64_t> stride, padding, dilation, output_padding;
  bool transposed;
  std::int64_t groups;

  Convolution(const Tensor& input, IntArrayRef s, IntArrayRef p, IntArrayRef d, bool is_transposed,
              IntArrayRef o, std::int64_t num_groups)
      : stride(spread(s, input)),
        padding(spread(p, input)),
        dilation(spread(d, input)),
        output_padding(spread(o, input)),
        transposed(is_transposed),
        groups(num_groups) {}

  // One number may stand for all dimensions.
  static std::vector<std::int64_t> spread(IntArrayRef values, const Tensor& input) {
    const auto count = static_cast<std::size_t>(input.dim() - 2);
    return values.size() == 1 ? std::vector<std::int64_t>(count, values[0]) : values.vec();
  }

  std::vector<std::int64_t> output_sizes(const Tensor& input, const Tensor& weight) const {
    std::vector<std::int64_t> sizes{input.size(0),
                                    transposed ? weight.size(1) * groups : weight.size(0)};
    for (std::size_t i = 0; i < stride.size(); ++i) {
      const auto dim = static_cast<std::int64_t>(i) + 2;
      const std::int64_t reach = dilation[i] * (weight.size(dim) - 1) + 1;
      sizes.push_back(transposed ? (input.size(dim) - 1) * stride[i] - 2 * padding[i] + reach +
                                       output_padding[i]
                                 : (input.size(dim) + 2 * padding[i] - reach) / stride[i] + 1);
    }
    return sizes;
  }

  std::string key(const char* name, const Tensor& input, const Tensor& weight) const {
    return fmt::format("{} {} {} {} {} {} {} {} {} {}", name, input.sizes().slice(1),
                       weight.sizes(), stride, padding, dilation, transposed, output_padding,
                       groups, c10::toString(input.scalar_type()));
  }
};

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, std::int64_t groups) {
  const Convolution call(input, stride, padding, dilation, transposed, output_padding, groups);
  Tensor output = floats(call.output_sizes(input, weight), input);
  const Probe probe = [&](std::int64_t count) -> std::function<void()> {
    return [&, x = sample(input, count), w = whole(weight), b = whole(bias)] {
      at::convolution(x, w, b, call.stride, call.padding, call.dilation, transposed,
                      call.output_padding, groups);
    };
  };
  const std::string key = call.key("convolution", input, weight) + (is_given(bias) ? " bias" : "");
  touch_scratch(peak_bytes(key, input.size(0), bytes_of({input, output}), probe), {output});
  return output;
}

Three convolution_backward(const Tensor& dy, const Tensor& input, const Tensor& weight,
                           at::OptionalIntArrayRef bias_sizes, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool transposed,
                           IntArrayRef output_padding, std::int64_t groups, Mask wanted) {
  const Convolution call(input, stride, padding, dilation, transposed, output_padding, groups);
  const Tensor dinput = wanted[0] ? floats(input.sizes(), input) : Tensor();
  const Tensor dweight = wanted[1] ? floats(weight.sizes(), weight) : Tensor();
  const Tensor dbias = wanted[2] ? floats({dy.size(1)}, weight) : Tensor();
  const Probe probe = [&](std::int64_t count) -> std::function<void()> {
    return [&, d = sample(dy, count), x = sample(input, count), w = whole(weight)] {
      at::convolution_backward(d, x, w, bias_sizes, call.stride, call.padding, call.dilation,
                               transposed, call.output_padding, groups, wanted);
    };
  };
  const std::string key =
      fmt::format("{} {}", call.key("convolution_backward", input, weight), wanted);
  touch_scratch(peak_bytes(key, input.size(0), bytes_of({input, dy}), probe),
                {dinput, dweight, dbias});
  return {dinput, dweight, dbias};
}

// ---- Norms.

Three batch_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                 const MaybeTensor& mean, const MaybeTensor& var, bool training, double momentum,
                 double eps) {
  const std::int64_t num_saved = training ? x.size(1) : 0;
  const Tensor y = at::empty_like(x), saved_mean = floats({num_saved}, x),
               saved_rstd = floats({num_saved}, x);
  const Probe probe = [&](std::int64_t count) -> std::function<void()> {
    return [=, s = sample(x, count), w = whole(weight), b = whole(bias), m = whole(mean),
            v = whole(var)] { at::native_batch_norm(s, w, b, m, v, training, momentum, eps); };
  };
  const std::string key = fmt::format("batch_norm {} {} {} {}", x.sizes().slice(1),
                                      is_given(weight), is_given(mean), training);
  touch_scratch(peak_bytes(key, x.size(0), 2 * bytes_of({x}), probe), {y, saved_mean, saved_rstd});
  return {y, saved_mean, saved_rstd};
}

Three batch_norm_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                          const MaybeTensor& mean, const MaybeTensor& var,
                          const MaybeTensor& saved_mean, const MaybeTensor& saved_rstd,
                          bool training, double eps, Mask wanted) {
  const Tensor dx = wanted[0] ? at::empty_like(x) : Tensor();
  const Tensor dweight = wanted[1] ? floats({x.size(1)}, x) : Tensor(),
               dbias = wanted[2] ? floats({x.size(1)}, x) : Tensor();
  const Probe probe = [&](std::int64_t count) -> std::function<void()> {
    return [=, d = sample(dy, count), s = sample(x, count), w = whole(weight), m = whole(mean),
            v = whole(var), sm = whole(saved_mean), sr = whole(saved_rstd)] {
      at::native_batch_norm_backward(d, s, w, m, v, sm, sr, training, eps, wanted);
    };
  };
  const std::string key = fmt::format("batch_norm_backward {} {} {} {}", x.sizes().slice(1),
                                      is_given(weight), training, wanted);
  touch_scratch(peak_bytes(key, x.size(0), 2 * bytes_of({x}), probe), {dx, dweight, dbias});
  return {dx, dweight, dbias};
}

std::int64_t num_rows(const Tensor& x, IntArrayRef normalized) {
  return std::accumulate(x.sizes().begin(), x.sizes().end() - normalized.size(), std::int64_t{1},
                         std::multiplies<>());
}

Three layer_norm(const Tensor& x, IntArrayRef normalized, const MaybeTensor& /*weight*/,
                 const MaybeTensor& /*bias*/, double /*eps*/) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  std::fill(sizes.end() - static_cast<std::ptrdiff_t>(normalized.size()), sizes.end(), 1);
  return {at::empty_like(x, at::MemoryFormat::Contiguous), floats(sizes, x), floats(sizes, x)};
}

Three layer_norm_backward(const Tensor& /*dy*/, const Tensor& x, IntArrayRef normalized,
                          const Tensor& mean, const Tensor& /*rstd*/, const MaybeTensor& weight,
                          const MaybeTensor& bias, Mask wanted) {
  const Tensor dx = wanted[0] ? at::empty_like(x, at::MemoryFormat::Contiguous) : Tensor();
  const Tensor dweight = wanted[1] && is_given(weight) ? at::empty_like(*weight) : Tensor();
  const Tensor dbias = wanted[2] && is_given(bias) ? at::empty_like(*bias) : Tensor();
  const Probe probe = [&](std::int64_t count) -> std::function<void()> {
    std::vector<std::int64_t> sizes = normalized.vec();
    sizes.insert(sizes.begin(), count);
    const Tensor rows = at::zeros(sizes, x.options().device(at::kCPU));
    const Tensor stats = at::zeros({count}, mean.options().device(at::kCPU));
    return [=, shape = normalized.vec(), w = whole(weight), b = whole(bias)] {
      at::native_layer_norm_backward(rows, rows, shape, stats, stats, w, b, wanted);
    };
  };
  const std::string key = fmt::format("layer_norm_backward {} {} {} {}", normalized,
                                      is_given(weight), is_given(bias), wanted);
  touch_scratch(peak_bytes(key, num_rows(x, normalized), 2 * bytes_of({x}), probe),
                {dx, dweight, dbias});
  return {dx, dweight, dbias};
}

// ---- Kernels whose results are all that they allocate.

Tensor relu(const Tensor& x) { return at::empty_like(x); }

Tensor index_select(const Tensor& x, std::int64_t dim, const Tensor& index) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim < 0 ? dim + x.dim() : dim)] = index.numel();
  return floats(sizes, x);
}

Tensor embedding_dense_backward(const Tensor& dy, const Tensor& /*indices*/,
                                std::int64_t num_weights, std::int64_t /*padding_idx*/,
                                bool /*scale_by_frequency*/) {
  return floats({num_weights, dy.size(-1)}, dy);
}

Tensor adaptive_avg_pool2d(const Tensor& x, IntArrayRef output_size) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  std::copy(output_size.begin(), output_size.end(), sizes.end() - 2);
  return floats(sizes, x);
}

Tensor adaptive_avg_pool2d_backward(const Tensor& /*dy*/, const Tensor& x) {
  return at::empty_like(x);
}

template <class Kernel>
void add_if_missing(torch::Library& library, const char* name, Kernel kernel) {
  const auto schema = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""});
  if (schema && !schema->hasKernelForDispatchKey(c10::DispatchKey::Meta))
    library.impl(name, kernel);
}

}  // namespace

CountOnlyScope::CountOnlyScope() : before_(std::exchange(may_run_kernels, false)) {}
CountOnlyScope::~CountOnlyScope() { may_run_kernels = before_; }

void register_shape_kernels() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
  add_if_missing(*library, "convolution", convolution);
  add_if_missing(*library, "convolution_backward", convolution_backward);
  add_if_missing(*library, "native_batch_norm", batch_norm);
  add_if_missing(*library, "native_batch_norm_backward", batch_norm_backward);
  add_if_missing(*library, "native_layer_norm", layer_norm);
  add_if_missing(*library, "native_layer_norm_backward", layer_norm_backward);
  add_if_missing(*library, "relu", relu);
  add_if_missing(*library, "index_select", index_select);
  add_if_missing(*library, "embedding_dense_backward", embedding_dense_backward);
  add_if_missing(*library, "_adaptive_avg_pool2d", adaptive_avg_pool2d);
  add_if_missing(*library, "_adaptive_avg_pool2d_backward", adaptive_avg_pool2d_backward);
}

}  // namespace headroom
