#include "ops/onednn_layouts.h"

#include "core/parallel.h"
#include "ops/graph_node.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

namespace headroom::ops {
namespace {

using dnnl::memory;

// What is changed at once: enough for all threads, and still in their caches when it is copied
// back.
constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;

// `count` samples of a batch, where they lie as can_change_in_place() wants them; else none.
memory::desc samples_of(const memory::desc& desc, const std::vector<std::int64_t>& sizes,
                        std::int64_t count) {
  memory::dims of_some(sizes);
  of_some[0] = count;
  const memory::desc some =
      desc.submemory_desc(of_some, memory::dims(sizes.size()), /*allow_empty=*/true);
  const std::int64_t elements = std::accumulate(of_some.begin(), of_some.end(), std::int64_t{1},
                                                std::multiplies<std::int64_t>());
  const auto bytes = static_cast<std::size_t>(elements) * sizeof(float);
  return some.is_zero() || some.get_size() != bytes ? memory::desc() : some;
}

bool has_whole_samples(const memory::desc& desc, const std::vector<std::int64_t>& sizes) {
  return !samples_of(desc, sizes, sizes[0]).is_zero() && !samples_of(desc, sizes, 1).is_zero();
}

at::Tensor part_of(const at::Tensor& whole, std::int64_t begin, std::int64_t bytes) {
  const at::Tensor part = at::empty({0}, whole.options().dtype(at::kByte));
  part.set_(whole.storage(),
            whole.storage_offset() * static_cast<std::int64_t>(whole.itemsize()) + begin, {bytes},
            {1});
  return part;
}

}  // namespace

memory::desc any_layout(const std::vector<std::int64_t>& sizes) {
  return {sizes, memory::data_type::f32, memory::format_tag::any};
}

memory::desc usual_layout(const std::vector<std::int64_t>& sizes) {
  memory::dims strides(sizes.size(), 1);
  for (std::size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes[i];
  return {sizes, memory::data_type::f32, strides};
}

at::Tensor space_for(const memory::desc& desc, const at::Tensor& like) {
  return at::empty({static_cast<std::int64_t>(desc.get_size())}, like.options().dtype(at::kByte));
}

void reorder(const Laid& from, const Laid& to) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::reorder::primitive_desc description(cpu_engine(), from.desc, cpu_engine(), to.desc,
                                                  attributes);
  run_primitive<dnnl::reorder>(description, {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}});
}

bool can_change_in_place(const memory::desc& from, const memory::desc& to,
                         const std::vector<std::int64_t>& sizes) {
  return from.get_size() >= static_cast<std::size_t>(2 * kPieceBytes) &&
         has_whole_samples(from, sizes) && has_whole_samples(to, sizes);
}

// A piece goes through a buffer that is small enough to stay in the caches.
void change_in_place(const Laid& from, const memory::desc& to,
                     const std::vector<std::int64_t>& sizes) {
  const std::int64_t sample_bytes = static_cast<std::int64_t>(from.desc.get_size()) / sizes[0];
  const std::int64_t most = std::clamp(kPieceBytes / sample_bytes, std::int64_t{1}, sizes[0]);
  const at::Tensor piece = at::empty({most * sample_bytes}, from.tensor.options().dtype(at::kByte));
  if (piece.is_meta()) return;
  for (std::int64_t first = 0; first < sizes[0]; first += most) {
    const std::int64_t count = std::min(most, sizes[0] - first);
    const at::Tensor samples = part_of(from.tensor, first * sample_bytes, count * sample_bytes);
    reorder({samples, samples_of(from.desc, sizes, count)}, {piece, samples_of(to, sizes, count)});
    char* back = static_cast<char*>(samples.data_ptr());
    const char* changed = static_cast<const char*>(piece.data_ptr());
    parallel_for(0, count * sample_bytes, 1 << 16, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(back + begin, changed + begin, static_cast<std::size_t>(end - begin));
    });
  }
}

Laid in_layout(Laid from, const memory::desc& to, const std::vector<std::int64_t>& sizes) {
  if (from.desc == to) return from;
  if (is_owned_alone(from.tensor) && can_change_in_place(from.desc, to, sizes)) {
    change_in_place(from, to, sizes);
    return {std::move(from.tensor), to};
  }
  const Laid copy{space_for(to, from.tensor), to};
  reorder(from, copy);
  return copy;
}

}  // namespace headroom::ops
