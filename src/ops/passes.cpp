#include "ops/passes.h"

#include "core/parallel.h"

#include <headroom/core/error.h>
#include "core/blas_kernels.h"
#include "core/torch_compat.h"
#include "ops/convert.h"
#include "ops/direct_gradient.h"
#include "ops/half_product.h"
#include "ops/rotary.h"
#include "ops/sizes.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

namespace headroom::ops {
namespace {

float* data(const at::Tensor& tensor) {
  return present(tensor) ? tensor.data_ptr<float>() : nullptr;
}
kernels::Values values(const at::Tensor& tensor) {
  if (!present(tensor) || tensor.is_meta()) return {};
  return {tensor.data_ptr(), tensor.scalar_type() == at::kBFloat16};
}
std::int64_t width_of(const at::Tensor& x) { return x.size(-1); }
std::int64_t rows_of(const at::Tensor& x) { return width_of(x) == 0 ? 0 : x.numel() / width_of(x); }

template <class Body>
void for_rows(const at::Tensor& x, const Body& body) {
  const std::int64_t grain =
      std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width_of(x)));
  parallel_for(0, rows_of(x), grain, body);
}

// Sums over rows in chunks whose number depends on the rows alone, so that the order of the sum is
// the same for any number of threads. body(partial, begin, end) adds rows [begin, end) to `partial`
// (num_sums x width floats, zeroed); the total of sum i goes to outs[i].
struct Total {
  at::Tensor to;  // undefined: not wanted
  bool accumulate = false;
};
template <class Body>
void sum_rows(const at::Tensor& x, std::initializer_list<Total> outs, const Body& body) {
  constexpr std::int64_t kMostChunks = 32, kFewestRows = 32;
  const std::int64_t num_rows = rows_of(x), width = width_of(x),
                     num_sums = static_cast<std::int64_t>(outs.size());
  const std::int64_t num_chunks = std::clamp<std::int64_t>(num_rows / kFewestRows, 1, kMostChunks);
  const std::int64_t chunk_rows = (num_rows + num_chunks - 1) / num_chunks;
  const at::Tensor partials = make_floats({num_chunks, num_sums * width}, x);
  if (x.is_meta()) return;
  float* base = partials.data_ptr<float>();
  parallel_for(0, num_chunks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      float* partial = base + chunk * num_sums * width;
      std::memset(partial, 0, static_cast<std::size_t>(num_sums * width) * sizeof(float));
      body(partial, std::min(num_rows, chunk * chunk_rows),
           std::min(num_rows, (chunk + 1) * chunk_rows));
    }
  });
  std::int64_t index = 0;
  for (const Total& out : outs) {
    if (present(out.to)) {
      kernels::reduce_rows(base + index * width, out.to.data_ptr<float>(), num_chunks,
                           num_sums * width, out.accumulate, 0, width);
    }
    ++index;
  }
}

// Hands out items one by one: with a causal mask or a busy core, equal shares would not take equal
// time.
template <class Body>
void for_items(std::int64_t num_items, std::int64_t num_workers, const Body& body) {
  std::atomic<std::int64_t> next{0};
  parallel_for(0, num_workers, 1, [&](std::int64_t worker, std::int64_t) {
    for (std::int64_t item = next++; item < num_items; item = next++) body(item, worker);
  });
}

// The cosines and sines that the call needs; undefined without rotary positions. They are made
// again for every call: beside the products that is little time, and nobody has to keep them.
at::Tensor table_of(const AttentionParams& params, const at::Tensor& qkv) {
  if (!params.rotary) return {};
  return rotary_table(*params.rotary, 0, qkv.size(1), params.head_size(qkv.size(2)), qkv);
}

kernels::AttentionCall make_call(const AttentionParams& params, const at::Tensor& qkv,
                                 const at::Tensor& bias, const at::Tensor& table) {
  kernels::AttentionCall call;
  call.num_samples = qkv.size(0);
  call.length = qkv.size(1);
  call.num_heads = params.num_heads;
  call.num_kv_heads = params.num_kv_heads;
  call.head_size = params.head_size(qkv.size(2));
  call.causal = params.causal;
  call.scale = 1.0f / std::sqrt(static_cast<float>(call.head_size));
  call.dropout = params.dropout;
  if (qkv.is_meta()) return call;
  call.qkv = values(qkv);
  call.qkv_bias = data(bias);
  if (present(table)) {
    call.rotary_cos = data(table);
    call.rotary_sin = call.rotary_cos + table.numel() / 2;
  }
  if (present(params.key_mask)) {
    if (params.key_mask.scalar_type() == at::kInt) {
      call.first_keys = params.key_mask.data_ptr<std::int32_t>();
    } else {
      call.key_mask = reinterpret_cast<const unsigned char*>(params.key_mask.data_ptr<bool>());
    }
  }
  return call;
}

std::int64_t num_workers_for(const kernels::AttentionCall& call) {
  return std::clamp<std::int64_t>(call.num_samples * call.num_kv_heads, 1, at::get_num_threads());
}

}  // namespace

bool has_kernels(const at::Tensor& x) {
  const bool takes_type =
      x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && is_autocast(x));
  return takes_type && (x.is_cpu() || x.is_meta());
}

bool is_autocast(const at::Tensor& x) {
  return x.is_cuda() ? HEADROOM_AUTOCAST_CUDA_ENABLED()
                     : (x.is_cpu() || x.is_meta()) && HEADROOM_AUTOCAST_CPU_ENABLED();
}

at::Tensor in_compute_type(const at::Tensor& x) {
  const bool converts = x.scalar_type() == at::kFloat && !x.is_cuda() && is_autocast(x);
  return converts ? x.to(at::kBFloat16) : x;
}

at::Tensor product_weight(const at::Tensor& weight, const at::Tensor& x) {
  if (x.scalar_type() != at::kBFloat16) return weight;
  if (weight.is_meta()) return make_values(weight.sizes(), x);
  return convert(weight, at::kBFloat16);
}

void keep_exact(SavedData& saved_data, const char* name, const at::Tensor& tensor) {
  if (tensor.defined()) saved_data[name] = tensor;
}

at::Tensor take_exact(const SavedData& saved_data, const char* name) {
  const auto found = saved_data.find(name);
  return found == saved_data.end() ? at::Tensor() : found->second.toTensor();
}

at::Tensor take_out(SavedData& saved_data, const char* name) {
  at::Tensor tensor = take_exact(saved_data, name);
  saved_data.erase(name);
  return tensor;
}

bool keeps_half(std::optional<at::ScalarType> type, std::int64_t num_elements) {
  return type && static_cast<std::size_t>(num_elements) * sizeof(float) >= kSmallestConvertedBytes;
}

void keep_type(SavedData& saved_data, std::optional<at::ScalarType> type) {
  if (type) saved_data["kept_type"] = static_cast<std::int64_t>(*type);
}

void round_as_kept(const SavedData& saved_data, const at::Tensor& x, std::int64_t num_elements) {
  const auto found = saved_data.find("kept_type");
  if (found == saved_data.end()) return;
  const auto type = static_cast<at::ScalarType>(found->second.toInt());
  if (keeps_half(type, num_elements)) round_to(x, type);
}

bool wants_grad(at::TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& t) { return t.defined() && t.requires_grad(); });
}

at::Tensor or_empty(const at::Tensor& tensor, const at::Tensor& like) {
  return tensor.defined() ? tensor.contiguous()
                          : at::empty({0}, like.options().requires_grad(false));
}

at::Tensor make_values(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, at::TensorOptions().dtype(like.scalar_type()).device(like.device()));
}

at::Tensor make_floats(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kFloat).device(like.device()));
}

ParameterGrad::ParameterGrad(const at::Tensor& parameter, bool needed) {
  if (!needed || !present(parameter)) return;
  if (const auto direct = direct_gradient(parameter)) {
    gradient = direct->gradient;
    accumulate = !direct->is_new;
  } else {
    gradient = returned = at::empty_like(parameter);
  }
}

kernels::Dropout draw_dropout(double p) {
  if (!(p >= 0.0 && p <= 1.0))
    throw ConfigError(fmt::format("dropout {} is not a probability: give a number from 0 to 1", p));
  if (p == 0.0) return {};
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return dropout_from_seed(p, at::check_generator<at::CPUGeneratorImpl>(generator)->random64());
}

kernels::Dropout dropout_from_seed(double p, std::uint64_t seed) {
  kernels::Dropout dropout;
  if (p == 0.0) return dropout;
  dropout.seed = seed;
  dropout.threshold = static_cast<std::uint32_t>(std::clamp(p * 4294967296.0, 1.0, 4294967295.0));
  dropout.scale = p == 1.0 ? 0.0f : static_cast<float>(1.0 / (1.0 - p));
  return dropout;
}

void linear(const at::Tensor& x, const at::Tensor& w, at::Tensor y, double beta) {
  if (x.scalar_type() == at::kBFloat16) return half_product(x, w.t(), y, beta);
  blas_core();
  if (!x.is_meta()) y.addmm_(x, w.t(), beta, 1.0);
}

void linear_grad_input(const at::Tensor& dy, const at::Tensor& w, at::Tensor dx) {
  if (dy.scalar_type() == at::kBFloat16) return half_product(dy, w, dx, 0.0);
  if (!dy.is_meta()) at::mm_out(dx, dy, w);
}

void linear_grad_weight(const at::Tensor& dy, const at::Tensor& x, at::Tensor dw, double beta) {
  if (dy.scalar_type() == at::kBFloat16) return half_product(dy.t(), x, dw, beta);
  if (!dy.is_meta()) dw.addmm_(dy.t(), x, beta, 1.0);
}

void layer_norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                        double eps, at::Tensor y, at::Tensor mean, at::Tensor rstd) {
  if (x.is_meta()) return;
  const kernels::Values px = values(x), py = values(y);
  const float *pw = data(weight), *pb = data(bias);
  float *pm = data(mean), *pr = data(rstd);
  for_rows(x, [&](std::int64_t begin, std::int64_t end) {
    kernels::layer_norm_forward(px, pw, pb, static_cast<float>(eps), py, pm, pr, begin, end,
                                width_of(x));
  });
}

void layer_norm_apply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& mean, const at::Tensor& rstd, at::Tensor y) {
  if (x.is_meta()) return;
  const kernels::Values px = values(x), py = values(y);
  const float *pw = data(weight), *pb = data(bias), *pm = data(mean), *pr = data(rstd);
  for_rows(x, [&](std::int64_t begin, std::int64_t end) {
    kernels::layer_norm_apply(px, pw, pb, pm, pr, py, begin, end, width_of(x));
  });
}

void layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean,
                         const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& residual, at::Tensor dx, const ParameterGrad& dweight,
                         const ParameterGrad& dbias) {
  const bool is_meta = x.is_meta();
  const kernels::Values pd = values(dy), px = values(x), ps = values(residual), po = values(dx);
  const float *pm = is_meta ? nullptr : data(mean), *pr = is_meta ? nullptr : data(rstd),
              *pw = is_meta ? nullptr : data(weight);
  const std::int64_t width = width_of(x);
  if (!mean.defined() && dweight.wanted()) {  // an RMS norm, which has no bias
    sum_rows(x, {{dweight.gradient, dweight.accumulate}},
             [&](float* partial, std::int64_t begin, std::int64_t end) {
               kernels::layer_norm_backward(pd, px, pm, pr, pw, ps, po, partial, nullptr, begin,
                                            end, width);
             });
  } else if (dweight.wanted() || dbias.wanted()) {
    sum_rows(x, {{dweight.gradient, dweight.accumulate}, {dbias.gradient, dbias.accumulate}},
             [&](float* partial, std::int64_t begin, std::int64_t end) {
               kernels::layer_norm_backward(pd, px, pm, pr, pw, ps, po, partial, partial + width,
                                            begin, end, width);
             });
  } else if (!is_meta) {
    for_rows(x, [&](std::int64_t begin, std::int64_t end) {
      kernels::layer_norm_backward(pd, px, pm, pr, pw, ps, po, nullptr, nullptr, begin, end, width);
    });
  }
}

void bias_gelu_forward(GeluKind kind, const at::Tensor& h, const at::Tensor& bias, at::Tensor y) {
  if (h.is_meta()) return;
  const kernels::Values ph = values(h), py = values(y);
  const float* pb = data(bias);
  for_rows(h, [&](std::int64_t begin, std::int64_t end) {
    kernels::bias_gelu_forward(kind, ph, pb, py, begin, end, width_of(h));
  });
}

void bias_gelu_backward(GeluKind kind, const at::Tensor& h, const at::Tensor& bias, at::Tensor d,
                        at::Tensor y, at::Tensor dbias, bool accumulate) {
  const bool is_meta = h.is_meta();
  const kernels::Values ph = values(h), pd = values(d), py = values(y);
  const float* pb = is_meta ? nullptr : data(bias);
  if (present(dbias)) {
    sum_rows(h, {{dbias, accumulate}}, [&](float* partial, std::int64_t begin, std::int64_t end) {
      kernels::bias_gelu_backward(kind, ph, pb, pd, py, partial, begin, end, width_of(h));
    });
  } else if (!is_meta) {
    for_rows(h, [&](std::int64_t begin, std::int64_t end) {
      kernels::bias_gelu_backward(kind, ph, pb, pd, py, nullptr, begin, end, width_of(h));
    });
  }
}

void swiglu_forward(const at::Tensor& h, const at::Tensor& bias, at::Tensor y) {
  if (h.is_meta()) return;
  const kernels::Values ph = values(h), py = values(y);
  const float* pb = data(bias);
  const std::int64_t stride = y.stride(0);
  for_rows(h, [&](std::int64_t begin, std::int64_t end) {
    kernels::swiglu_forward(ph, pb, py, stride, begin, end, width_of(h) / 2);
  });
}

void swiglu_backward(const at::Tensor& h, const at::Tensor& bias, at::Tensor d, at::Tensor y,
                     at::Tensor dbias, bool accumulate) {
  const bool is_meta = h.is_meta();
  const kernels::Values ph = values(h), pd = values(d), py = values(y);
  const float* pb = is_meta ? nullptr : data(bias);
  const std::int64_t stride = y.defined() ? y.stride(0) : 0, width = width_of(h) / 2;
  if (present(dbias)) {
    sum_rows(h, {{dbias, accumulate}}, [&](float* partial, std::int64_t begin, std::int64_t end) {
      kernels::swiglu_backward(ph, pb, pd, py, stride, partial, begin, end, width);
    });
  } else if (!is_meta) {
    for_rows(h, [&](std::int64_t begin, std::int64_t end) {
      kernels::swiglu_backward(ph, pb, pd, py, stride, nullptr, begin, end, width);
    });
  }
}

void add_bias(const at::Tensor& x, const at::Tensor& bias, at::Tensor y) {
  if (x.is_meta()) return;
  const kernels::Values px = values(x), py = values(y);
  const float* pb = data(bias);
  for_rows(x, [&](std::int64_t begin, std::int64_t end) {
    kernels::add_bias(px, pb, py, begin, end, width_of(x));
  });
}

void dropout_add(const kernels::Dropout& dropout, const at::Tensor& x, const at::Tensor& bias,
                 const at::Tensor& residual, at::Tensor y, std::int64_t first_row) {
  if (x.is_meta()) return;
  const kernels::Values px = values(x), pr = values(residual), py = values(y);
  const float* pb = data(bias);
  for_rows(x, [&](std::int64_t begin, std::int64_t end) {
    kernels::dropout_add(dropout, px, pb, pr, py, first_row, begin, end, width_of(x));
  });
}

void column_sums(const at::Tensor& x, at::Tensor sums, bool accumulate) {
  const kernels::Values px = values(x);
  const std::int64_t stride = x.stride(0);
  sum_rows(x, {{sums, accumulate}}, [&](float* partial, std::int64_t begin, std::int64_t end) {
    kernels::column_sums(px, stride, partial, begin, end, width_of(x));
  });
}

AttentionParams::AttentionParams(std::int64_t heads, const AttentionOptions& options,
                                 const at::Tensor& like)
    : num_heads(heads),
      num_kv_heads(options.num_kv_heads.value_or(heads)),
      causal(options.causal),
      dropout_p(options.dropout_p),
      dropout(draw_dropout(options.dropout_p)),
      rotary(options.rotary),
      key_mask(key_mask_of(options, like)) {}

AttentionParams::AttentionParams(const SavedData& saved_data, const at::Tensor& mask)
    : num_heads(saved_data.at("num_heads").toInt()),
      num_kv_heads(saved_data.at("num_kv_heads").toInt()),
      causal(saved_data.at("causal").toBool()),
      dropout_p(saved_data.at("attention_dropout_p").toDouble()),
      dropout(dropout_from_seed(
          dropout_p, static_cast<std::uint64_t>(saved_data.at("attention_seed").toInt()))),
      key_mask(mask) {
  const auto found = saved_data.find("rotary");
  if (found == saved_data.end()) return;
  const std::vector<double> numbers = found->second.toDoubleVector();
  rotary = RotaryOptions{numbers.at(0), std::nullopt};
  if (numbers.size() > 1) {
    rotary->scaling = RotaryScaling{numbers.at(1), numbers.at(2), numbers.at(3),
                                    static_cast<std::int64_t>(numbers.at(4))};
  }
}

void AttentionParams::keep(SavedData& saved_data) const {
  saved_data["num_heads"] = num_heads;
  saved_data["num_kv_heads"] = num_kv_heads;
  saved_data["causal"] = causal;
  saved_data["attention_dropout_p"] = dropout_p;
  saved_data["attention_seed"] = static_cast<std::int64_t>(dropout.seed);
  if (!rotary) return;
  std::vector<double> numbers{rotary->theta};
  if (const auto& s = rotary->scaling) {
    numbers.insert(numbers.end(), {s->factor, s->low_frequency_factor, s->high_frequency_factor,
                                   static_cast<double>(s->original_length)});
  }
  saved_data["rotary"] = numbers;
}

void attention_forward(const AttentionParams& params, const at::Tensor& qkv, const at::Tensor& bias,
                       at::Tensor y, at::Tensor softmax) {
  const at::Tensor table = table_of(params, qkv);
  const kernels::AttentionCall call = make_call(params, qkv, bias, table);
  const std::int64_t num_workers = num_workers_for(call),
                     size = kernels::attention_forward_scratch(call.length, call.head_size);
  const at::Tensor scratch = make_floats({num_workers, size}, qkv);
  if (qkv.is_meta() || qkv.numel() == 0) return;
  const kernels::Values py = values(y);
  float *base = data(scratch), *ps = data(softmax);
  for_items(call.num_samples * call.num_kv_heads, num_workers,
            [&](std::int64_t item, std::int64_t worker) {
              kernels::attention_forward_group(call, py, ps, item, base + worker * size);
            });
}

void attention_backward(const AttentionParams& params, const at::Tensor& qkv,
                        const at::Tensor& bias, const at::Tensor& y, const at::Tensor& softmax,
                        const at::Tensor& dy, at::Tensor dqkv) {
  const at::Tensor table = table_of(params, qkv);
  const kernels::AttentionCall call = make_call(params, qkv, bias, table);
  const std::int64_t num_workers = num_workers_for(call),
                     size = kernels::attention_backward_scratch(call.length, call.head_size);
  const at::Tensor scratch = make_floats({num_workers, size}, qkv);
  if (qkv.is_meta() || qkv.numel() == 0) return;
  const kernels::Values py = values(y), pd = values(dy), po = values(dqkv);
  const float* ps = data(softmax);
  float* base = data(scratch);
  for_items(call.num_samples * call.num_kv_heads, num_workers,
            [&](std::int64_t item, std::int64_t worker) {
              kernels::attention_backward_group(call, py, ps, pd, po, item, base + worker * size);
            });
}

}  // namespace headroom::ops
