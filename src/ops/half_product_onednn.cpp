#include "ops/half_product.h"

#include "ops/half_product_in_float.h"
#include "ops/onednn_layouts.h"

namespace headroom::ops {
namespace {

using dnnl::memory;

memory::desc describe(const at::Tensor& matrix) {
  return memory::desc(
      {matrix.size(0), matrix.size(1)},
      matrix.scalar_type() == at::kBFloat16 ? memory::data_type::bf16 : memory::data_type::f32,
      memory::dims{matrix.stride(0), matrix.stride(1)});
}

// oneDNN keeps what it generated for sizes that it has seen, so that asking again is cheap.
dnnl::matmul::primitive_desc describe_product(const at::Tensor& a, const at::Tensor& b,
                                              const at::Tensor& c, double beta) {
  dnnl::primitive_attr attributes;
  // The scratch memory is a tensor of ours, which the budget counts.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (beta != 0.0) {
    dnnl::post_ops sum;
    sum.append_sum(static_cast<float>(beta));
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  return {cpu_engine(), describe(a), describe(b), describe(c), attributes};
#else
  return {dnnl::matmul::desc(describe(a), describe(b), describe(c)), attributes, cpu_engine()};
#endif
}

bool try_product() {
  try {
    const auto matrix = [](at::ScalarType type) {
      return at::empty({64, 64}, at::TensorOptions().dtype(type).device(at::kMeta));
    };
    describe_product(matrix(at::kBFloat16), matrix(at::kBFloat16), matrix(at::kFloat), 1.0);
    return true;
  } catch (const dnnl::error&) {
    return false;  // this CPU has no instructions that oneDNN would use
  }
}

}  // namespace

bool has_fast_half_products() {
  static const bool has = try_product();
  return has;
}

void half_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double beta) {
  if (c.numel() == 0) return;
  if (!has_fast_half_products() || a.size(1) == 0) return half_product_in_float(a, b, c, beta);
  const dnnl::matmul::primitive_desc product = describe_product(a, b, c, beta);
  run_primitive<dnnl::matmul>(product, {{DNNL_ARG_SRC, {a, product.src_desc()}},
                                        {DNNL_ARG_WEIGHTS, {b, product.weights_desc()}},
                                        {DNNL_ARG_DST, {c, product.dst_desc()}}});
}

}  // namespace headroom::ops
