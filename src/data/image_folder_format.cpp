#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/text.h"
#include "data/data_folder.h"
#include "data/data_format.h"
#include "data/image_reader.h"
#include "data/pair_dataset.h"
#include "data/subset.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

namespace headroom {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> images_in(const std::string& folder) {
  std::vector<std::string> names = names_in(folder);
  names.erase(std::remove_if(names.begin(), names.end(),
                             [](const std::string& name) { return !is_image_name(name); }),
              names.end());
  return names;
}

// Class folders, or images themselves, which then have texts beside them.
bool holds_images(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    if (is_image_name(name)) return true;
    const std::string inner = (fs::path(folder) / name).string();
    if (is_folder(inner) && !images_in(inner).empty()) return true;
  }
  return false;
}

bool is_image_folder(const std::string& dataset) {
  if (!is_folder(dataset)) return false;
  const DataParts parts = parts_of(dataset);
  return holds_images(parts.train.empty() ? dataset : parts.train);
}

// Images by class folder, in the order of their names.
struct ClassFolders {
  std::vector<std::string> paths;
  std::vector<std::string> labels;  // of each image
};

ClassFolders list_classes(const std::string& folder) {
  ClassFolders found;
  for (const std::string& label : names_in(folder)) {
    const std::string inner = (fs::path(folder) / label).string();
    if (!is_folder(inner)) {
      if (is_image_name(label))
        throw DataError(
            fmt::format("{}: the image '{}' is in no class folder; expected class/x.jpg",
                        shown_path(folder), label));
      continue;
    }
    const std::vector<std::string> images = images_in(inner);
    if (images.empty())
      throw DataError(
          fmt::format("{}: the class has no image (.jpg, .jpeg, .png)", shown_path(inner)));
    for (const std::string& image : images) {
      found.paths.push_back((fs::path(inner) / image).string());
      found.labels.push_back(label);
    }
  }
  if (found.paths.empty())
    throw DataError(fmt::format("{}: holds no class folder with images", shown_path(folder)));
  return found;
}

class LabelledImages final : public Dataset {
 public:
  LabelledImages(ClassFolders found, const LabelMap& labels, const ImageTransform& transform,
                 std::int64_t num_workers)
      : images_(std::move(found.paths), transform, num_workers) {
    for (const std::string& label : found.labels) classes_.push_back(labels.number(label));
  }

  std::int64_t size() const override { return images_.size(); }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    const at::Tensor labels = at::empty({count}, at::kLong);
    auto* out = labels.data_ptr<std::int64_t>();
    for (const std::int64_t index : indices) *out++ = classes_[static_cast<std::size_t>(index)];
    return {{images_.load(indices)}, {labels}, count, count};
  }
  void expect(c10::ArrayRef<std::int64_t> indices) const override { images_.expect(indices); }

 private:
  std::vector<std::int64_t> classes_;
  ImageReader images_;
};

[[noreturn]] void refuse_class(const std::string& folder, const std::string& label,
                               const std::string& whose) {
  throw DataError(
      fmt::format("{}: the class '{}' is none of {}", shown_path(folder), label, whose));
}

OpenedData open_classes(const DataRequest& request) {
  const DataParts parts = parts_of(request.dataset);
  const std::string folder = parts.train.empty() ? request.dataset : parts.train;
  const ImageTransform transform = image_transform_of(request.model_folder, request.input);
  ClassFolders found = list_classes(folder);
  const LabelMap labels =
      map_labels(found.labels, request.labels, !request.is_trained,
                 [&](const std::string& label) { refuse_class(folder, label, "the model's"); });
  OpenedData data;
  data.labels = labels.names();
  data.files = {{"preprocessor_config.json", to_preprocessor_config(transform)}};
  const auto make = [&](ClassFolders files) {
    return std::make_shared<LabelledImages>(std::move(files), labels, transform,
                                            request.num_workers);
  };
  if (parts.train.empty()) {
    std::tie(data.train, data.eval) = hold_out_a_tenth(make(std::move(found)), request.order_seed);
    return data;
  }
  data.train = make(std::move(found));
  if (parts.eval.empty()) return data;
  ClassFolders held = list_classes(parts.eval);
  for (const std::string& label : held.labels) {
    if (!labels.has(label)) refuse_class(parts.eval, label, "those of " + shown_path(folder));
  }
  data.eval = make(std::move(held));
  return data;
}

// Images with a text of the same name beside them.
ImageTexts list_pairs(const std::string& folder) {
  constexpr std::int64_t kMostTextBytes = 1 << 20;
  ImageTexts pairs;
  for (const std::string& name : images_in(folder)) {
    const fs::path image = fs::path(folder) / name;
    const std::string text = fs::path(image).replace_extension(".txt").string();
    if (!path_exists(text))
      throw DataError(fmt::format("{}: has no text beside it: expected {}",
                                  shown_path(image.string()), shown_path(text)));
    pairs.images.push_back(image.string());
    pairs.texts.push_back(InputFile(text).read_all(kMostTextBytes));
    pairs.places.push_back(text);
  }
  if (pairs.images.empty())
    throw DataError(fmt::format("{}: holds no pair of x.jpg and x.txt", shown_path(folder)));
  return pairs;
}

OpenedData open_image_folder(const DataRequest& request) {
  if (request.input.kind == ModelInput::Kind::kImages) return open_classes(request);
  const DataParts parts = parts_of(request.dataset);
  return open_pairs(request, list_pairs(parts.train.empty() ? request.dataset : parts.train),
                    parts.eval.empty() ? ImageTexts{} : list_pairs(parts.eval));
}

}  // namespace

DataFormat image_folder_format() {
  using Kind = ModelInput::Kind;
  return {"a folder of images (class/x.jpg, .png; x.jpg with x.txt)",
          "holds images",
          {Kind::kImages, Kind::kPairs},
          false,
          is_image_folder,
          open_image_folder};
}

}  // namespace headroom
