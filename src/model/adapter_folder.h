#pragma once

// A folder with adapters in PEFT's layout.

#include <headroom/model/pretrained.h>
#include "model/adapter_config.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// The name of a layer's matrix 'A' (r, in) or 'B' (out, r):
/// "base_model.model.<layer>.lora_A.weight".
std::string adapter_tensor_name(const std::string& layer, char matrix);
using AdapterTensors = std::vector<std::pair<std::string, at::Tensor>>;
void add_adapter_tensors(AdapterTensors& tensors, const std::string& layer, const at::Tensor& down,
                         const at::Tensor& up);

/// A matrix A as it starts: with the values of a linear layer of LibTorch's, or, where a file is
/// about to give them (UninitializedScope), with none.
at::Tensor make_adapter_down(std::int64_t r, std::int64_t in, const at::TensorOptions& options);

/// What the format of a chain with adapters is, beside how it is saved.
class AdapterOwner {
 public:
  virtual ~AdapterOwner() = default;
  virtual AdapterTensors adapter_tensors() const = 0;
  /// As merge_adapters(). The chain may get another format meanwhile.
  virtual void merge_into(Chain& chain) const = 0;
};
/// Null for a chain without adapters.
const AdapterOwner* adapters_of(const Chain& chain);

/// Writes the adapters and their config. Where that names no base, `save_base` is given a folder
/// inside of this one first.
SavedModel save_adapters(AdapterConfig config, const AdapterTensors& tensors,
                         const std::string& folder,
                         const std::function<void(const std::string&)>& save_base);

/// The folder of the model that the adapters of `folder` are for. Throws DataError when there is
/// none.
std::string base_of_adapters(const std::string& folder);

/// The file with the adapters of a folder.
std::string adapter_weights_file(const std::string& folder);

}  // namespace headroom
