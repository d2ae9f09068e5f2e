#include "train/shape_bucket.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>

namespace headroom {
namespace {

std::int64_t round_up_to_bucket(std::int64_t size) {
  std::int64_t power = 4;
  while (2 * power < size) power *= 2;
  const std::int64_t step = size <= 4 ? 1 : power / 4;
  return (size + step - 1) / step * step;
}

bool have_same_form(const Shapes& a, const Shapes& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(),
                    [](const auto& x, const auto& y) { return x.size() == y.size(); });
}

at::Tensor with_shape(at::Tensor tensor, const std::vector<std::int64_t>& shape) {
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const auto dim = static_cast<std::int64_t>(i) + 1;
    const std::int64_t size = tensor.size(dim);
    if (size == shape[i] || size == 0) continue;
    tensor = tensor.index_select(dim, torch::arange(shape[i], torch::kLong).clamp_max(size - 1));
  }
  return tensor;
}

}  // namespace

Shapes shapes_of(const MicroBatch& micro) {
  Shapes shapes;
  for (const std::vector<at::Tensor>* tensors : {&micro.inputs, &micro.targets}) {
    for (const at::Tensor& tensor : *tensors) {
      shapes.emplace_back();
      if (tensor.defined() && tensor.dim() > 1) shapes.back() = tensor.sizes().slice(1).vec();
    }
  }
  return shapes;
}

Shapes bucket_bounds(Shapes shapes) {
  for (std::vector<std::int64_t>& shape : shapes) {
    for (std::int64_t& size : shape) size = round_up_to_bucket(size);
  }
  return shapes;
}

std::string bucket_key(const Shapes& shapes) {
  std::string key;
  for (const std::vector<std::int64_t>& shape : bucket_bounds(shapes)) {
    key += fmt::format("{}{}", key.empty() ? "" : "_",
                       shape.empty() ? "1" : fmt::format("{}", fmt::join(shape, "x")));
  }
  return key;
}

bool covers(const Shapes& large, const Shapes& small) {
  return have_same_form(large, small) &&
         std::equal(large.begin(), large.end(), small.begin(), [](const auto& a, const auto& b) {
           return std::equal(a.begin(), a.end(), b.begin(),
                             [](std::int64_t x, std::int64_t y) { return x >= y; });
         });
}

Shapes merged(const Shapes& a, const Shapes& b) {
  if (!have_same_form(a, b)) return b;
  Shapes result = b;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t d = 0; d < a[i].size(); ++d) result[i][d] = std::max(a[i][d], b[i][d]);
  }
  return result;
}

std::string to_text(const Shapes& shapes) {
  std::vector<std::string> texts;
  for (const std::vector<std::int64_t>& shape : shapes) {
    const std::string text = fmt::format("{}", fmt::join(shape, "x"));
    if (!text.empty() && std::find(texts.begin(), texts.end(), text) == texts.end())
      texts.push_back(text);
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

MicroBatch with_shapes(MicroBatch micro, const Shapes& shapes) {
  const Shapes now = shapes_of(micro);
  if (now == shapes || !have_same_form(now, shapes)) return micro;
  std::size_t index = 0;
  for (std::vector<at::Tensor>* tensors : {&micro.inputs, &micro.targets}) {
    for (at::Tensor& tensor : *tensors) tensor = with_shape(std::move(tensor), shapes[index++]);
  }
  return micro;
}

}  // namespace headroom
