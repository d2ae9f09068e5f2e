#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

class HashedFile;

/// Writes a whole safetensors file, to be committed by the caller. Makes no tensor: a piece of
/// about a MiB, outside of the cap, is all that it takes.
void write_safetensors(HashedFile& file,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace headroom
