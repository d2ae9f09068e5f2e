#include "data/array_dataset.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include "core/input_file.h"
#include "core/integers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>
#include <utility>

namespace headroom {
namespace {

// One array of a file that stays open.
class ArrayReader {
 public:
  ArrayReader(StoredArray array, bool scales_bytes)
      : array_(std::move(array)),
        file_(std::make_shared<InputFile>(array_.path)),
        scales_bytes_(scales_bytes && array_.dtype == at::kByte) {
    if (array_.shape.empty() || array_.shape.front() == 0) fail("holds no sample");
    std::optional<std::int64_t> elements = 1;
    for (std::size_t i = 1; i < array_.shape.size() && elements; ++i)
      elements = checked_product({*elements, array_.shape[i]});
    const auto bytes =
        elements ? checked_product({*elements, num_samples(),
                                    static_cast<std::int64_t>(c10::elementSize(array_.dtype))})
                 : std::nullopt;
    if (!bytes || array_.begin + *bytes > file_->size()) {
      fail(fmt::format("announces ({}) elements, more than the file of {} bytes holds",
                       fmt::join(array_.shape, ", "), file_->size()));
    }
    elements_ = *elements;
  }

  std::int64_t num_samples() const { return array_.shape.front(); }
  const StoredArray& array() const { return array_; }
  [[noreturn]] void fail(const std::string& what) const {
    throw DataError(fmt::format("{}: {} {}", shown_path(array_.path), array_.name, what));
  }

  at::ScalarType result_type() const {
    if (c10::isFloatingType(array_.dtype) || scales_bytes_) return at::kFloat;
    return array_.dtype == at::kBool ? at::kBool : at::kLong;
  }

  at::Tensor load(c10::ArrayRef<std::int64_t> indices) const {
    std::vector<std::int64_t> sizes = array_.shape;
    sizes.front() = static_cast<std::int64_t>(indices.size());
    const at::Tensor result = at::empty(sizes, result_type());
    const auto element = static_cast<std::int64_t>(c10::elementSize(array_.dtype));
    const std::int64_t row_bytes = elements_ * element;
    auto* out = static_cast<char*>(result.data_ptr());
    const bool is_same = result.scalar_type() == array_.dtype;
    // Outside of tensor memory, which a plan counts to the byte.
    std::vector<char> row(is_same ? 0 : static_cast<std::size_t>(row_bytes));
    for (const std::int64_t index : indices) {
      char* to = is_same ? out : row.data();
      file_->read_at(array_.begin + index * row_bytes, to, row_bytes);
      if (!is_same) convert(row.data(), out);
      out += elements_ * static_cast<std::int64_t>(c10::elementSize(result.scalar_type()));
    }
    return result;
  }

 private:
  template <typename From, typename To>
  void convert_as(const char* from, char* to) const {
    const auto* in = reinterpret_cast<const From*>(from);
    auto* out = reinterpret_cast<To*>(to);
    for (std::int64_t i = 0; i < elements_; ++i) out[i] = static_cast<To>(in[i]);
  }

  void convert(const char* from, char* to) const {
    switch (array_.dtype) {
      case at::kDouble:
        return convert_as<double, float>(from, to);
      case at::kHalf:
        return convert_as<at::Half, float>(from, to);
      case at::kBFloat16:
        return convert_as<at::BFloat16, float>(from, to);
      case at::kInt:
        return convert_as<std::int32_t, std::int64_t>(from, to);
      case at::kShort:
        return convert_as<std::int16_t, std::int64_t>(from, to);
      case at::kChar:
        return convert_as<std::int8_t, std::int64_t>(from, to);
      default:
        break;
    }
    if (!scales_bytes_) return convert_as<std::uint8_t, std::int64_t>(from, to);
    const auto* in = reinterpret_cast<const std::uint8_t*>(from);
    auto* out = reinterpret_cast<float*>(to);
    for (std::int64_t i = 0; i < elements_; ++i) out[i] = static_cast<float>(in[i]) / 255.0f;
  }

  StoredArray array_;
  std::shared_ptr<const InputFile> file_;
  bool scales_bytes_;
  std::int64_t elements_ = 1;  // of a sample
};

class ArrayDataset final : public Dataset {
 public:
  ArrayDataset(std::vector<ArrayReader> inputs, std::vector<ArrayReader> targets,
               std::optional<std::int64_t> most_input, std::optional<std::int64_t> most_target)
      : inputs_(std::move(inputs)),
        targets_(std::move(targets)),
        most_input_(most_input),
        most_target_(most_target) {}

  std::int64_t size() const override { return inputs_.front().num_samples(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    MicroBatch batch;
    batch.num_samples = static_cast<std::int64_t>(indices.size());
    for (const ArrayReader& input : inputs_) {
      batch.inputs.push_back(input.load(indices));
      check_below(input, batch.inputs.back(), indices, most_input_, "token");
    }
    for (const ArrayReader& target : targets_) batch.targets.push_back(target.load(indices));
    if (!targets_.empty())
      check_below(targets_.front(), batch.targets.front(), indices, most_target_, "class");
    batch.num_items = items_of(batch);
    return batch;
  }

  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    if (targets_.empty() || targets_.front().result_type() != at::kLong) return count;
    MicroBatch batch{{}, {targets_.front().load(indices)}, count, 0};
    return items_of(batch);
  }

 private:
  // Counted here, because an operation of LibTorch would take tensor memory.
  static std::int64_t items_of(const MicroBatch& batch) {
    if (batch.targets.empty() || batch.targets.front().scalar_type() != at::kLong)
      return batch.num_samples;
    const at::Tensor& target = batch.targets.front();
    const auto* values = target.data_ptr<std::int64_t>();
    return target.numel() - std::count(values, values + target.numel(), kIgnoreIndex);
  }

  static void check_below(const ArrayReader& reader, const at::Tensor& tensor,
                          c10::ArrayRef<std::int64_t> indices, std::optional<std::int64_t> most,
                          const char* what) {
    if (!most || tensor.scalar_type() != at::kLong) return;
    const auto* values = tensor.data_ptr<std::int64_t>();
    const std::int64_t per_sample = tensor.numel() / static_cast<std::int64_t>(indices.size());
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      if ((values[i] >= 0 && values[i] < *most) || values[i] == kIgnoreIndex) continue;
      reader.fail(fmt::format("has the {} {} in row {}, but the model knows 0 to {}", what,
                              values[i], indices[static_cast<std::size_t>(i / per_sample)],
                              *most - 1));
    }
  }

  std::vector<ArrayReader> inputs_, targets_;
  std::optional<std::int64_t> most_input_, most_target_;
};

void check_images(const ArrayReader& images, const DataRequest& request) {
  const ModelInput& input = request.input;
  const std::vector<std::int64_t> expected = {input.channels, input.rows, input.columns};
  const std::vector<std::int64_t>& shape = images.array().shape;
  if (std::equal(shape.begin() + 1, shape.end(), expected.begin(), expected.end())) return;
  images.fail(fmt::format(
      "is ({}), but model {} reads (samples, {}): set channels, rows and columns in --model_config",
      fmt::join(shape, ", "), request.model, fmt::join(expected, ", ")));
}

}  // namespace

std::unique_ptr<Dataset> make_array_dataset(std::vector<StoredArray> inputs,
                                            std::vector<StoredArray> targets,
                                            const DataRequest& request) {
  using Kind = ModelInput::Kind;
  const ModelInput& input = request.input;
  const bool reads_images = input.kind == Kind::kImages || input.kind == Kind::kPairs;
  std::vector<ArrayReader> input_readers, target_readers;
  for (StoredArray& array : inputs) input_readers.emplace_back(std::move(array), reads_images);
  for (StoredArray& array : targets) target_readers.emplace_back(std::move(array), false);
  const ArrayReader& first = input_readers.front();
  if (target_readers.empty() && input.kind != Kind::kPairs && !request.takes_any_shape)
    first.fail("has no targets beside it: save targets.npy too");
  for (const std::vector<ArrayReader>* readers : {&input_readers, &target_readers}) {
    for (const ArrayReader& reader : *readers) {
      if (reader.num_samples() == first.num_samples()) continue;
      reader.fail(fmt::format("holds {} samples, but {} holds {}", reader.num_samples(),
                              first.array().name, first.num_samples()));
    }
  }
  if (request.takes_any_shape) {
    return std::make_unique<ArrayDataset>(std::move(input_readers), std::move(target_readers),
                                          std::nullopt, std::nullopt);
  }
  if (reads_images) check_images(first, request);
  const bool are_classes = input.kind == Kind::kImages || input.kind == Kind::kTexts;
  std::optional<std::int64_t> most_input, most_target = input.vocabulary;
  if (input.kind == Kind::kTokens) most_input = input.vocabulary;
  if (are_classes) most_target = input.num_classes;
  return std::make_unique<ArrayDataset>(std::move(input_readers), std::move(target_readers),
                                        most_input, most_target);
}

}  // namespace headroom
