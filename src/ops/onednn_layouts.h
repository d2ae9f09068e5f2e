#pragma once

// How primitives of oneDNN are run on tensors, and tensors brought into the layouts that these
// want.

#include <ATen/ATen.h>

#include <oneapi/dnnl/dnnl.hpp>

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace headroom::ops {

inline const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

/// Elements, and the layout in which they are; the tensor's own sizes and type say nothing of it.
struct Laid {
  at::Tensor tensor;
  dnnl::memory::desc desc;
};

/// Floats in a layout that a primitive may choose.
dnnl::memory::desc any_layout(const std::vector<std::int64_t>& sizes);
/// Floats as a contiguous tensor has them.
dnnl::memory::desc usual_layout(const std::vector<std::int64_t>& sizes);

/// Bytes for what `desc` describes.
at::Tensor space_for(const dnnl::memory::desc& desc, const at::Tensor& like);

using Arguments = std::vector<std::pair<int, Laid>>;

/// Runs a primitive with scratch memory that is a tensor, which the budget counts. On the meta
/// device only that is made.
template <class Primitive>
void run_primitive(const typename Primitive::primitive_desc& description,
                   const Arguments& arguments) {
  const dnnl::memory::desc scratch_desc = description.scratchpad_desc();
  const at::Tensor scratch = space_for(scratch_desc, arguments.front().second.tensor);
  if (scratch.is_meta()) return;
  std::unordered_map<int, dnnl::memory> memories;
  for (const auto& [name, laid] : arguments)
    memories.emplace(name, dnnl::memory(laid.desc, cpu_engine(), laid.tensor.data_ptr()));
  memories.emplace(DNNL_ARG_SCRATCHPAD,
                   dnnl::memory(scratch_desc, cpu_engine(), scratch.data_ptr()));
  dnnl::stream stream(cpu_engine());
  Primitive(description).execute(stream, memories);
  stream.wait();
}

/// Copies elements into another layout.
void reorder(const Laid& from, const Laid& to);

/// The elements of a tensor of `sizes` in the layout `to`: in the same memory where nobody else
/// holds it and it is large, else in a copy.
Laid in_layout(Laid from, const dnnl::memory::desc& to, const std::vector<std::int64_t>& sizes);

/// Whether a tensor of `sizes` is brought from one layout into the other without a copy. So it is
/// where both have the samples one behind the other, each in as much memory as its elements take.
bool can_change_in_place(const dnnl::memory::desc& from, const dnnl::memory::desc& to,
                         const std::vector<std::int64_t>& sizes);
void change_in_place(const Laid& from, const dnnl::memory::desc& to,
                     const std::vector<std::int64_t>& sizes);

/// A contiguous tensor of `sizes` that fill(Laid) gives in the layout `given`.
template <class Fill>
at::Tensor in_usual_layout(const dnnl::memory::desc& given, const std::vector<std::int64_t>& sizes,
                           const at::TensorOptions& options, const Fill& fill) {
  const dnnl::memory::desc usual = usual_layout(sizes);
  if (given == usual || can_change_in_place(given, usual, sizes)) {
    at::Tensor result = at::empty(sizes, options);
    fill(Laid{result, given});
    if (given != usual) change_in_place({result, given}, usual, sizes);
    return result;
  }
  const Laid filled{space_for(given, at::empty({0}, options)), given};
  fill(filled);
  at::Tensor result = at::empty(sizes, options);
  reorder(filled, {result, usual});
  return result;
}

}  // namespace headroom::ops
