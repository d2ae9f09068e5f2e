#include <headroom/data/dataset.h>

#include <headroom/core/error.h>

#include <fmt/format.h>

namespace headroom {
namespace {

void check_samples(const std::vector<at::Tensor>& tensors, const char* what,
                   std::int64_t num_samples) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (tensor.defined() && (tensor.dim() == 0 || tensor.size(0) != num_samples)) {
      throw DataError(fmt::format(
          "{} {} of a batch has {} along dimension 0, but the batch has {} samples; dimension 0 "
          "must be the sample",
          what, i, tensor.dim() == 0 ? "nothing" : std::to_string(tensor.size(0)), num_samples));
    }
  }
}

std::vector<at::Tensor> narrowed(const std::vector<at::Tensor>& tensors, std::int64_t start,
                                 std::int64_t size) {
  std::vector<at::Tensor> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors)
    views.push_back(tensor.defined() ? tensor.narrow(0, start, size) : tensor);
  return views;
}

}  // namespace

std::int64_t count_items(const MicroBatch& micro, std::int64_t ignore_index) {
  if (micro.targets.empty() || !micro.targets.front().defined()) return micro.num_samples;
  const at::Tensor& target = micro.targets.front();
  if (!at::isIntegralType(target.scalar_type(), /*includeBool=*/false)) return micro.num_samples;
  return target.ne(ignore_index).sum().item<std::int64_t>();
}

std::vector<std::int64_t> balanced_sizes(std::int64_t total, std::int64_t max_size) {
  if (total < 0) throw ConfigError(fmt::format("cannot split {} samples", total));
  if (max_size < 1)
    throw ConfigError(fmt::format(
        "cannot split {} samples in micro-batches of {}; at least 1 is needed", total, max_size));
  const std::int64_t num_parts = total / max_size + (total % max_size != 0 ? 1 : 0);
  std::vector<std::int64_t> sizes;
  sizes.reserve(num_parts);
  for (std::int64_t part = 0; part < num_parts; ++part)
    sizes.push_back(total / num_parts + (part < total % num_parts ? 1 : 0));
  return sizes;
}

std::vector<MicroBatch> split(const MicroBatch& batch, std::int64_t max_micro_batch,
                              const ItemCount& count) {
  check_samples(batch.inputs, "input", batch.num_samples);
  check_samples(batch.targets, "target", batch.num_samples);
  std::vector<MicroBatch> parts;
  std::int64_t start = 0;
  std::int64_t num_items = 0;
  for (const std::int64_t size : balanced_sizes(batch.num_samples, max_micro_batch)) {
    MicroBatch part{narrowed(batch.inputs, start, size), narrowed(batch.targets, start, size), size,
                    0};
    part.num_items = count ? count(part) : count_items(part);
    num_items += part.num_items;
    start += size;
    parts.push_back(std::move(part));
  }
  if (batch.num_items != 0 && num_items != batch.num_items) {
    throw DataError(
        fmt::format("the batch says {} items, but its micro-batches have {}; give split() the "
                    "function that counted the batch's",
                    batch.num_items, num_items));
  }
  return parts;
}

}  // namespace headroom
