#include "data/data_format.h"

#include <headroom/core/error.h>
#include "core/input_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace headroom {
namespace {

bool serves(const DataFormat& format, ModelInput::Kind kind) {
  return std::find(format.kinds.begin(), format.kinds.end(), kind) != format.kinds.end();
}

const char* samples_of(ModelInput::Kind kind) {
  switch (kind) {
    case ModelInput::Kind::kImages:
      return "images";
    case ModelInput::Kind::kTokens:
      return "tokens";
    case ModelInput::Kind::kPairs:
      return "images with their texts";
    case ModelInput::Kind::kTexts:
      return "texts with their classes";
  }
  return "";
}

}  // namespace

const std::vector<DataFormat>& data_formats() {
  static const std::vector<DataFormat> formats = {
      synthetic_format(), array_format(), image_folder_format(), table_format(),
      idx_format(),       token_format(), text_format()};
  return formats;
}

const DataFormat& format_of(const std::string& dataset) {
  for (const DataFormat& format : data_formats()) {
    if (format.recognises(dataset)) return format;
  }
  throw DataError(
      fmt::format("dataset '{}': no such file or folder (known names: fashion-mnist, synthetic)",
                  shown_path(dataset)));
}

OpenedData open_data(const DataRequest& request) {
  const DataFormat& format = format_of(request.dataset);
  if (serves(format, request.input.kind)) return format.open(request);
  std::vector<std::string> others;
  for (const DataFormat& other : data_formats()) {
    if (serves(other, request.input.kind)) others.emplace_back(other.help);
  }
  throw DataError(fmt::format("model {} reads {}, but dataset '{}' {}; give {}", request.model,
                              samples_of(request.input.kind), shown_path(request.dataset),
                              format.what, fmt::join(others, ", or ")));
}

std::optional<Masking> masking_of(const ModelInput& input, std::int64_t mask_token,
                                  std::uint64_t seed) {
  return input.num_masked > 0 ? std::optional<Masking>({input.num_masked, mask_token, seed})
                              : std::nullopt;
}

}  // namespace headroom
