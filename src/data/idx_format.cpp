#include "data/data_format.h"

#include <headroom/core/error.h>
#include "core/input_file.h"

#include <fmt/format.h>

#include <future>

namespace headroom {
namespace {

constexpr const char* kFashionMnist = "fashion-mnist";
constexpr const char* kFashionMnistFolder = "/usr/share/datasets/fashion-mnist";

bool is_idx(const std::string& dataset) { return dataset == kFashionMnist || is_folder(dataset); }

OpenedData open_idx(const DataRequest& request) {
  const std::string folder =
      request.dataset == kFashionMnist ? kFashionMnistFolder : request.dataset;
  const ModelInput& input = request.input;
  OpenedData data;
  // To inflate the images takes as long as to load LibTorch: the smaller file at the same time.
  auto eval = std::async(std::launch::async, open_idx_images, folder, false, input.num_classes);
  data.train = open_idx_images(folder, true, input.num_classes);
  data.eval = eval.get();
  const at::Tensor image = data.train->load({0}).inputs.at(0);  // (1, C, rows, columns)
  if (image.size(1) != input.channels || image.size(2) != input.rows ||
      image.size(3) != input.columns) {
    throw DataError(
        fmt::format("model {} reads images of {}x{}x{}, but '{}' holds {}x{}x{}; set channels, "
                    "rows and columns in --model_config",
                    request.model, input.channels, input.rows, input.columns, folder, image.size(1),
                    image.size(2), image.size(3)));
  }
  return data;
}

}  // namespace

DataFormat idx_format() {
  return {"fashion-mnist or an IDX folder",
          "holds images",
          {ModelInput::Kind::kImages},
          false,
          is_idx,
          open_idx};
}

}  // namespace headroom
