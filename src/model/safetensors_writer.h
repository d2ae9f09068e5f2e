#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class OutputFile;

/// Writes a whole safetensors file, to be committed by the caller, and returns its SHA-256.
std::string write_safetensors(OutputFile& file,
                              const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                              const std::map<std::string, std::string>& metadata);

}  // namespace headroom
