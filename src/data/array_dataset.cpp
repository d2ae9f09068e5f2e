#include "data/array_dataset.h"

#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include "core/input_file.h"
#include "core/integers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

namespace headroom {
namespace {

// What the elements of an array are to a model.
struct Elements {
  enum class Kind {
    kAny,      // as they are
    kPixels,   // bytes are scaled to [0, 1]
    kNumbers,  // of tokens, classes or places: whole
    kFlags,    // true for what is not 0
  };
  Kind kind = Kind::kAny;
  const char* what = "";             // a number: "token"
  std::optional<std::int64_t> most;  // numbers are below it
  bool may_be_ignored = false;       // kIgnoreIndex is allowed too
};

// One array of a file that stays open.
class ArrayReader {
 public:
  ArrayReader(StoredArray array, const Elements& meaning)
      : array_(std::move(array)),
        meaning_(meaning),
        file_(std::make_shared<InputFile>(array_.path)),
        scales_bytes_(meaning.kind == Elements::Kind::kPixels && array_.dtype == at::kByte) {
    const bool is_whole = !c10::isFloatingType(array_.dtype) && array_.dtype != at::kBool;
    if (meaning.kind == Elements::Kind::kNumbers && !is_whole)
      fail(fmt::format("is of {}, but the number of a {} is whole", c10::toString(array_.dtype),
                       meaning.what));
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
    if (meaning_.kind == Elements::Kind::kFlags) return at::kBool;
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
    check(result, indices);
    return result;
  }

 private:
  void check(const at::Tensor& tensor, c10::ArrayRef<std::int64_t> indices) const {
    if (!meaning_.most || tensor.scalar_type() != at::kLong) return;
    const auto* values = tensor.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      const bool is_known = values[i] >= 0 && values[i] < *meaning_.most;
      if (is_known || (meaning_.may_be_ignored && values[i] == kIgnoreIndex)) continue;
      fail(fmt::format("has the {} {} in row {}, but the model knows 0 to {}", meaning_.what,
                       values[i], indices[static_cast<std::size_t>(i / elements_)],
                       *meaning_.most - 1));
    }
  }

  template <typename From, typename To>
  void convert_as(const char* from, char* to) const {
    const auto* in = reinterpret_cast<const From*>(from);
    auto* out = reinterpret_cast<To*>(to);
    for (std::int64_t i = 0; i < elements_; ++i) {
      if constexpr (std::is_same_v<To, bool>) {
        out[i] = static_cast<float>(in[i]) != 0.0f;
      } else {
        out[i] = static_cast<To>(in[i]);
      }
    }
  }

  void convert(const char* from, char* to) const {
    if (meaning_.kind == Elements::Kind::kFlags) return convert_to<bool>(from, to);
    if (scales_bytes_) {
      const auto* in = reinterpret_cast<const std::uint8_t*>(from);
      auto* out = reinterpret_cast<float*>(to);
      for (std::int64_t i = 0; i < elements_; ++i) out[i] = static_cast<float>(in[i]) / 255.0f;
    } else if (c10::isFloatingType(array_.dtype)) {
      convert_to<float>(from, to);
    } else {
      convert_to<std::int64_t>(from, to);
    }
  }

  template <typename To>
  void convert_to(const char* from, char* to) const {
    switch (array_.dtype) {
      case at::kDouble:
        return convert_as<double, To>(from, to);
      case at::kFloat:
        return convert_as<float, To>(from, to);
      case at::kHalf:
        return convert_as<at::Half, To>(from, to);
      case at::kBFloat16:
        return convert_as<at::BFloat16, To>(from, to);
      case at::kLong:
        return convert_as<std::int64_t, To>(from, to);
      case at::kInt:
        return convert_as<std::int32_t, To>(from, to);
      case at::kShort:
        return convert_as<std::int16_t, To>(from, to);
      case at::kChar:
        return convert_as<std::int8_t, To>(from, to);
      default:
        return convert_as<std::uint8_t, To>(from, to);
    }
  }

  StoredArray array_;
  Elements meaning_;
  std::shared_ptr<const InputFile> file_;
  bool scales_bytes_;
  std::int64_t elements_ = 1;  // of a sample
};

class ArrayDataset final : public Dataset {
 public:
  // `judged_by`: of texts whose places are in no array, which token judges them.
  enum class JudgedBy { kArray, kFirst, kLast };

  ArrayDataset(std::vector<ArrayReader> inputs, std::vector<ArrayReader> targets,
               JudgedBy judged_by)
      : inputs_(std::move(inputs)), targets_(std::move(targets)), judged_by_(judged_by) {}

  std::int64_t size() const override { return inputs_.front().num_samples(); }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    MicroBatch batch;
    batch.num_samples = static_cast<std::int64_t>(indices.size());
    for (const ArrayReader& input : inputs_) batch.inputs.push_back(input.load(indices));
    for (const ArrayReader& target : targets_) batch.targets.push_back(target.load(indices));
    batch.num_items = items_of(batch);
    if (judged_by_ != JudgedBy::kArray) batch.targets.push_back(places_of(batch));
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

  at::Tensor places_of(const MicroBatch& batch) const {
    const at::Tensor places = at::empty({batch.num_samples, 1}, at::kLong);
    const std::int64_t length = batch.inputs.front().size(1);
    const bool* seen = batch.inputs.size() > 1 ? batch.inputs[1].data_ptr<bool>() : nullptr;
    for (std::int64_t i = 0; i < batch.num_samples; ++i) {
      std::int64_t place = judged_by_ == JudgedBy::kFirst ? 0 : length - 1;
      while (seen != nullptr && place > 0 && !seen[i * length + place]) --place;
      places.data_ptr<std::int64_t>()[i] = place;
    }
    return places;
  }

  std::vector<ArrayReader> inputs_, targets_;
  JudgedBy judged_by_;
};

using Kind = ModelInput::Kind;

bool has_places(const ModelInput& input) {
  return input.kind == Kind::kTexts || (input.kind == Kind::kTokens && input.num_masked > 0);
}

// Tokens in a row of the arrays; what is wrong with their shape is said later.
std::int64_t row_length(const std::vector<StoredArray>& inputs, const ModelInput& input) {
  const std::size_t number = input.kind == Kind::kPairs ? 1 : 0;
  if (number >= inputs.size() || inputs[number].shape.size() != 2) return input.length;
  return inputs[number].shape[1];
}

// Of the inputs of a model, by their number.
Elements meaning_of_input(const ModelInput& input, std::size_t number, std::int64_t length) {
  using Of = Elements::Kind;
  const bool has_image = input.kind == Kind::kImages || input.kind == Kind::kPairs;
  if (has_image && number == 0) return {Of::kPixels, "", {}, false};
  if (input.kind == Kind::kImages) return {};
  const std::size_t place = has_image ? number - 1 : number;
  if (place == 0) return {Of::kNumbers, "token", input.vocabulary, false};
  if (has_image) return {Of::kNumbers, "place", length, false};
  return {Of::kFlags, "", {}, false};
}

Elements meaning_of_target(const ModelInput& input, std::size_t number, std::int64_t length) {
  using Of = Elements::Kind;
  if (number > 0) return {Of::kNumbers, "place", length, false};
  if (input.kind == Kind::kTokens) return {Of::kNumbers, "token", input.vocabulary, true};
  return {Of::kNumbers, "class", input.num_classes, true};
}

void check_number(const std::vector<ArrayReader>& arrays, const char* name, std::size_t least,
                  std::size_t most, const ArrayReader& first, const DataRequest& request) {
  if (arrays.size() >= least && arrays.size() <= most) return;
  first.fail(fmt::format("belongs to {} arrays of {}, but model {} reads {}{}: {}", arrays.size(),
                         name, request.model, least == most ? "" : fmt::format("{} to ", least),
                         most, "save them as " + std::string(name) + "_0, ..."));
}

void check_shape(const ArrayReader& array, const std::vector<std::int64_t>& of_sample,
                 const DataRequest& request, const char* hint) {
  const std::vector<std::int64_t>& shape = array.array().shape;
  if (std::equal(shape.begin() + 1, shape.end(), of_sample.begin(), of_sample.end())) return;
  array.fail(fmt::format("is ({}), but model {} reads (samples{}{}){}", fmt::join(shape, ", "),
                         request.model, of_sample.empty() ? "" : ", ", fmt::join(of_sample, ", "),
                         hint));
}

// Tokens are rows of at most the model's length, whose number is returned.
std::int64_t check_rows(const ArrayReader& array, const DataRequest& request) {
  const std::vector<std::int64_t>& shape = array.array().shape;
  if (shape.size() == 2 && shape[1] >= 1 && shape[1] <= request.input.length) return shape[1];
  array.fail(fmt::format("is ({}), but model {} reads (samples, tokens), of which at most {}",
                         fmt::join(shape, ", "), request.model, request.input.length));
}

void check_inputs(const std::vector<ArrayReader>& inputs, const DataRequest& request) {
  const ModelInput& input = request.input;
  const ArrayReader& first = inputs.front();
  const bool has_image = input.kind == Kind::kImages || input.kind == Kind::kPairs;
  const std::size_t most = input.kind == Kind::kImages ? 1 : has_image ? 3 : 2;
  check_number(inputs, "inputs", has_image ? most : 1, most, first, request);
  if (has_image) {
    check_shape(first, {input.channels, input.rows, input.columns}, request,
                ": set channels, rows and columns in --model_config");
  }
  if (input.kind == Kind::kImages) return;
  const std::int64_t length = check_rows(inputs[has_image ? 1 : 0], request);
  if (inputs.size() > 1) check_shape(inputs.back(), {has_image ? 1 : length}, request, "");
}

void check_targets(const std::vector<ArrayReader>& inputs, const std::vector<ArrayReader>& targets,
                   const DataRequest& request) {
  const ModelInput& input = request.input;
  const ArrayReader& first = inputs.front();
  if (input.kind == Kind::kPairs) return check_number(targets, "targets", 0, 0, first, request);
  if (targets.empty()) first.fail("has no targets beside it: save targets.npy too");
  const std::size_t most = has_places(input) ? 2 : 1;
  check_number(targets, "targets", input.kind == Kind::kTokens ? most : 1, most, targets.front(),
               request);
  const ArrayReader& target = targets.front();
  if (input.kind != Kind::kTokens) {
    check_shape(target, {}, request, "");
    if (targets.size() > 1) check_shape(targets[1], {1}, request, "");
  } else if (input.num_masked > 0) {
    check_shape(targets[1], {check_rows(target, request)}, request, "");
  } else {
    check_shape(target, {first.array().shape[1]}, request, "");
  }
}

}  // namespace

std::unique_ptr<Dataset> make_array_dataset(std::vector<StoredArray> inputs,
                                            std::vector<StoredArray> targets,
                                            const DataRequest& request) {
  const ModelInput& input = request.input;
  const bool is_open = request.takes_any_shape;
  const std::int64_t length = row_length(inputs, input);
  std::vector<ArrayReader> input_readers, target_readers;
  for (StoredArray& array : inputs) {
    const Elements any{input.kind == Kind::kImages ? Elements::Kind::kPixels : Elements::Kind::kAny,
                       "", std::nullopt, false};
    const Elements meaning = is_open ? any : meaning_of_input(input, input_readers.size(), length);
    input_readers.emplace_back(std::move(array), meaning);
  }
  for (StoredArray& array : targets) {
    const Elements meaning =
        is_open ? Elements() : meaning_of_target(input, target_readers.size(), length);
    target_readers.emplace_back(std::move(array), meaning);
  }
  const ArrayReader& first = input_readers.front();
  for (const std::vector<ArrayReader>* readers : {&input_readers, &target_readers}) {
    for (const ArrayReader& reader : *readers) {
      if (reader.num_samples() == first.num_samples()) continue;
      reader.fail(fmt::format("holds {} samples, but {} holds {}", reader.num_samples(),
                              first.array().name, first.num_samples()));
    }
  }
  if (!is_open) {
    check_inputs(input_readers, request);
    check_targets(input_readers, target_readers, request);
  }
  using JudgedBy = ArrayDataset::JudgedBy;
  JudgedBy judged_by = JudgedBy::kArray;
  if (!is_open && input.kind == Kind::kTexts && target_readers.size() == 1)
    judged_by = input.sees_all_tokens ? JudgedBy::kFirst : JudgedBy::kLast;
  return std::make_unique<ArrayDataset>(std::move(input_readers), std::move(target_readers),
                                        judged_by);
}

}  // namespace headroom
