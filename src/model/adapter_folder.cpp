#include "model/adapter_folder.h"

#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include "core/hashed_file.h"
#include "core/input_file.h"
#include "core/output_file.h"
#include "model/model_format.h"
#include "model/published.h"
#include "model/safetensors_writer.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>

namespace headroom {

namespace fs = std::filesystem;

std::string adapter_tensor_name(const std::string& layer, char matrix) {
  return fmt::format("base_model.model.{}.lora_{}.weight", layer, matrix);
}

void add_adapter_tensors(AdapterTensors& tensors, const std::string& layer, const at::Tensor& down,
                         const at::Tensor& up) {
  tensors.emplace_back(adapter_tensor_name(layer, 'A'), down.detach());
  tensors.emplace_back(adapter_tensor_name(layer, 'B'), up.detach());
}

at::Tensor make_adapter_down(std::int64_t r, std::int64_t in, const at::TensorOptions& options) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  at::Tensor down = torch::empty({r, in}, options);
  if (!UninitializedScope::is_active()) down.uniform_(-bound, bound);
  return down;
}

const AdapterOwner* adapters_of(const Chain& chain) {
  return dynamic_cast<const AdapterOwner*>(chain.format().get());
}

SavedModel save_adapters(AdapterConfig config, const AdapterTensors& tensors,
                         const std::string& folder,
                         const std::function<void(const std::string&)>& save_base) {
  if (config.base.empty()) {
    config.base = (fs::absolute(folder) / "base_model").lexically_normal().string();
    std::error_code error;
    fs::create_directories(config.base, error);
    if (error)
      throw ConfigError(fmt::format("'{}' cannot be made: {}", config.base, error.message()));
    save_base(config.base);
  }
  const fs::path weights = adapter_weights_file(folder);
  OutputFile config_file((fs::path(folder) / kAdapterConfigFile).string());
  HashedFile weights_file(weights.string());
  config_file.write(to_text(config));
  write_safetensors(weights_file, tensors, {{"format", "pt"}});
  config_file.commit();
  const FileDigest digest = weights_file.commit();
  sync_folder(folder, throw_as<ConfigError>);
  return {weights.filename().string(), digest.sha256};
}

bool is_adapter_folder(const std::string& folder) {
  return path_exists((fs::path(folder) / kAdapterConfigFile).string()) &&
         !path_exists((fs::path(folder) / "config.json").string());
}

std::string base_of_adapters(const std::string& folder) {
  const std::string base = read_adapter_config(folder).base;
  // A folder that was moved has its base still inside of it.
  const fs::path beside = fs::path(folder) / base,
                 inside = fs::path(folder) / fs::path(base).filename();
  for (const fs::path& path : {fs::path(base), beside, inside}) {
    std::error_code ignored;
    if (!base.empty() && is_folder(path.string()) && !fs::equivalent(path, folder, ignored))
      return path.string();
  }
  throw DataError(
      fmt::format("'{}' holds adapters for '{}', which is no folder here: download that model and "
                  "set base_model_name_or_path in {} to its folder",
                  shown_path(folder), base, kAdapterConfigFile));
}

std::string adapter_weights_file(const std::string& folder) {
  return (fs::path(folder) / kAdapterWeightsFile).string();
}

}  // namespace headroom
