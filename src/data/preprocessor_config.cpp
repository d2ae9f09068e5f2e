// preprocessor_config.json, which says how the images of a model are prepared.
#include <headroom/core/error.h>
#include "core/input_file.h"
#include "data/image_transform.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <optional>
#include <utility>

namespace headroom {
namespace {

using Json = nlohmann::ordered_json;

class PreprocessorFile {
 public:
  explicit PreprocessorFile(std::string path) : path_(std::move(path)) {
    json_ = Json::parse(read_json_text(path_), nullptr, /*allow_exceptions=*/false);
    if (!json_.is_object())
      throw DataError(fmt::format("{}: is not a JSON object", shown_path(path_)));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError(fmt::format("{}: {}", shown_path(path_), what));
  }

  bool flag(const char* key, bool if_absent) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return if_absent;
    if (!found->is_boolean()) refuse(fmt::format("{} is neither true nor false", key));
    return found->get<bool>();
  }

  double number(const char* key, double if_absent) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return if_absent;
    if (!found->is_number()) refuse(fmt::format("{} is not a number", key));
    return found->get<double>();
  }

  std::vector<double> numbers(const char* key) const {
    std::vector<double> values;
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return values;
    if (!found->is_array()) refuse(fmt::format("{} is not a list of numbers", key));
    for (const Json& value : *found) {
      if (!value.is_number()) refuse(fmt::format("{} is not a list of numbers", key));
      values.push_back(value.get<double>());
    }
    return values;
  }

  // "size" and "crop_size": rows and columns, or the shorter edge alone.
  struct Size {
    std::int64_t rows = 0, columns = 0, shortest_edge = 0;
  };
  std::optional<Size> size(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return std::nullopt;
    const auto side = [&](const Json& value) {
      constexpr std::int64_t kMostSide = 1 << 16;
      if (!value.is_number_integer() || value.get<std::int64_t>() < 1 ||
          value.get<std::int64_t>() > kMostSide)
        refuse(fmt::format("{} has a side of {}", key, value.dump()));
      return value.get<std::int64_t>();
    };
    Size size;
    if (found->is_number()) {
      size.rows = size.columns = side(*found);
      // Before sizes had names, CLIP's was that of the shorter edge.
      if (std::string(key) == "size" && is_clip()) size = {0, 0, size.rows};
    } else if (found->contains("height") && found->contains("width")) {
      size = {side((*found)["height"]), side((*found)["width"]), 0};
    } else if (found->contains("shortest_edge") && found->size() == 1) {
      size.shortest_edge = side((*found)["shortest_edge"]);
    } else {
      refuse(fmt::format("{} {} cannot be served here; known: height and width, shortest_edge", key,
                         found->dump()));
    }
    return size;
  }

 private:
  bool is_clip() const {
    for (const char* key : {"image_processor_type", "feature_extractor_type"}) {
      const auto found = json_.find(key);
      if (found != json_.end() && found->is_string() &&
          found->get<std::string>().find("CLIP") != std::string::npos)
        return true;
    }
    return false;
  }

  std::string path_;
  Json json_;
};

ResizeFilter filter_of(const PreprocessorFile& file) {
  const double resample = file.number("resample", 2);
  for (const ResizeFilter filter :
       {ResizeFilter::kLanczos, ResizeFilter::kBilinear, ResizeFilter::kBicubic}) {
    if (resample == static_cast<int>(filter)) return filter;
  }
  file.refuse(fmt::format(
      "resample {} cannot be served here; known: 1 (Lanczos), 2 (bilinear), 3 (bicubic)",
      resample));
}

void read_sizes(const PreprocessorFile& file, ImageTransform& transform) {
  PreprocessorFile::Size result{transform.rows, transform.columns, 0};
  const bool crops = file.flag("do_center_crop", false);
  if (file.flag("do_resize", true)) {
    const auto size = file.size("size");
    if (size) result = *size;
    transform.shortest_edge = result.shortest_edge;
  }
  if (crops) {
    const auto crop = file.size("crop_size");
    if (!crop || crop->shortest_edge != 0) file.refuse("do_center_crop needs crop_size");
    if (transform.shortest_edge == 0 &&
        (crop->rows != result.rows || crop->columns != result.columns))
      file.refuse("a crop of another size than height and width cannot be served here");
    if (transform.shortest_edge > 0 &&
        (crop->rows > transform.shortest_edge || crop->columns > transform.shortest_edge))
      file.refuse("crop_size is larger than what the image is resized to");
    result = *crop;
  } else if (transform.shortest_edge > 0) {
    file.refuse("shortest_edge without do_center_crop gives images of different sizes");
  }
  if (result.rows != transform.rows || result.columns != transform.columns) {
    file.refuse(fmt::format("makes images of {} x {}, but the model reads {} x {}", result.rows,
                            result.columns, transform.rows, transform.columns));
  }
}

void check_channels(const PreprocessorFile& file, const char* key, std::vector<double>& values,
                    std::int64_t channels) {
  const auto count = static_cast<std::size_t>(channels);
  if (values.size() == 1) values.assign(count, values.front());
  if (values.size() != count)
    file.refuse(fmt::format("{} has {} values for {} channels", key, values.size(), channels));
}

}  // namespace

ImageTransform image_transform_of(const std::string& model_folder, const ModelInput& input) {
  ImageTransform transform;
  transform.channels = input.channels;
  transform.rows = input.rows;
  transform.columns = input.columns;
  transform.mean = input.pixel_mean;
  transform.deviation = input.pixel_deviation;
  const std::string path = model_folder.empty()
                               ? ""
                               : (std::filesystem::path(model_folder) / "preprocessor_config.json");
  if (path.empty() || !path_exists(path)) return transform;
  const PreprocessorFile file(path);
  read_sizes(file, transform);
  transform.filter = filter_of(file);
  transform.rescale_factor =
      file.flag("do_rescale", true) ? file.number("rescale_factor", 1.0 / 255.0) : 1.0;
  // Some files have the factor rounded.
  if (std::abs(transform.rescale_factor * 255.0 - 1.0) < 1e-9)
    transform.rescale_factor = 1.0 / 255.0;
  if (!file.flag("do_normalize", true)) {
    transform.mean.clear();
    transform.deviation.clear();
    return transform;
  }
  if (std::vector<double> mean = file.numbers("image_mean"); !mean.empty()) transform.mean = mean;
  if (std::vector<double> deviation = file.numbers("image_std"); !deviation.empty())
    transform.deviation = deviation;
  if (transform.mean.empty() && transform.deviation.empty()) return transform;
  check_channels(file, "image_mean", transform.mean, transform.channels);
  check_channels(file, "image_std", transform.deviation, transform.channels);
  for (const double deviation : transform.deviation) {
    if (!(deviation > 0)) file.refuse(fmt::format("image_std has {}", deviation));
  }
  return transform;
}

std::string to_preprocessor_config(const ImageTransform& transform) {
  const Json sides = {{"height", transform.rows}, {"width", transform.columns}};
  const bool crops = transform.shortest_edge > 0;
  Json json = {{"image_processor_type", crops ? "CLIPImageProcessor" : "ViTImageProcessor"},
               {"do_resize", true},
               {"size", crops ? Json{{"shortest_edge", transform.shortest_edge}} : sides},
               {"resample", static_cast<int>(transform.filter)},
               {"do_rescale", transform.rescale_factor != 1.0},
               {"rescale_factor", transform.rescale_factor},
               {"do_normalize", !transform.mean.empty()}};
  if (crops) {
    json["do_center_crop"] = true;
    json["crop_size"] = sides;
  }
  if (!transform.mean.empty()) {
    json["image_mean"] = transform.mean;
    json["image_std"] = transform.deviation;
  }
  return json.dump(2) + "\n";
}

}  // namespace headroom
