#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/text.h"
#include "data/array_dataset.h"
#include "data/data_folder.h"
#include "data/npy_file.h"
#include "data/subset.h"

#include <fmt/format.h>

#include <filesystem>
#include <optional>

namespace headroom {
namespace {

namespace fs = std::filesystem;

bool is_tensor_file(const std::string& path) {
  return ends_with(path, ".safetensors") && is_regular_file(path);
}

std::string npy_path(const std::string& folder, const std::string& name) {
  return (fs::path(folder) / (name + ".npy")).string();
}

bool holds_arrays(const std::string& folder) {
  return path_exists(npy_path(folder, "inputs")) || path_exists(npy_path(folder, "inputs_0"));
}

bool is_arrays(const std::string& dataset) {
  if (is_tensor_file(dataset)) return true;
  if (!is_folder(dataset)) return false;
  const DataParts parts = parts_of(dataset);
  return holds_arrays(parts.train.empty() ? dataset : parts.train);
}

// "inputs" alone, or "inputs_0", "inputs_1", ... as far as they go.
template <typename Find>
std::vector<StoredArray> arrays_named(const std::string& name, const Find& find) {
  if (std::optional<StoredArray> only = find(name)) return {*only};
  std::vector<StoredArray> arrays;
  while (std::optional<StoredArray> next = find(fmt::format("{}_{}", name, arrays.size())))
    arrays.push_back(*next);
  return arrays;
}

std::shared_ptr<const Dataset> open_part(const std::string& path, const DataRequest& request) {
  std::vector<StoredArray> of_file;
  const bool is_file = !is_folder(path);
  if (is_file) {
    if (!request.list_arrays)
      throw DataError(fmt::format("{}: .safetensors cannot be read here", shown_path(path)));
    of_file = request.list_arrays(path);
  }
  const auto find = [&](const std::string& name) -> std::optional<StoredArray> {
    if (!is_file) {
      const std::string file = npy_path(path, name);
      return path_exists(file) ? std::optional<StoredArray>(read_npy_header(file)) : std::nullopt;
    }
    for (const StoredArray& array : of_file) {
      if (array.name == name) return array;
    }
    return std::nullopt;
  };
  std::vector<StoredArray> inputs = arrays_named("inputs", find);
  if (inputs.empty()) {
    throw DataError(fmt::format("{}: holds no array named inputs or inputs_0", shown_path(path)));
  }
  return make_array_dataset(std::move(inputs), arrays_named("targets", find), request);
}

OpenedData open_arrays(const DataRequest& request) {
  OpenedData data;
  const DataParts parts = is_folder(request.dataset) ? parts_of(request.dataset) : DataParts{};
  if (parts.train.empty()) {
    std::tie(data.train, data.eval) =
        hold_out_a_tenth(open_part(request.dataset, request), request.order_seed);
    return data;
  }
  data.train = open_part(parts.train, request);
  if (!parts.eval.empty()) data.eval = open_part(parts.eval, request);
  return data;
}

}  // namespace

DataFormat array_format() {
  using Kind = ModelInput::Kind;
  return {"a folder with inputs.npy and targets.npy, or a .safetensors of them",
          "holds arrays",
          {Kind::kImages, Kind::kTokens, Kind::kPairs, Kind::kTexts},
          false,
          is_arrays,
          open_arrays};
}

}  // namespace headroom
