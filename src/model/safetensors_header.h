#pragma once

// The JSON at the start of a safetensors file, and the index of a model in several files.

#include <headroom/model/safetensors.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// The length of the header, 8 bytes, comes before it.
inline constexpr std::int64_t kSafetensorsLengthBytes = 8;
inline constexpr std::int64_t kMostSafetensorsHeaderBytes = 100'000'000;

/// Reads the JSON of a header for a file with `num_data_bytes` after it. Entries come in the order
/// of their bytes, `begin` counted from the end of the header. Throws DataError with what is wrong;
/// `path` is for messages.
std::vector<SafetensorsEntry> parse_safetensors_header(const std::string& path,
                                                       const std::string& json,
                                                       std::int64_t num_data_bytes);

/// The first bytes of a file with these tensors, whose bytes follow in this order: length and JSON,
/// padded so that the tensors are aligned. Throws ConfigError.
std::string make_safetensors_header(const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                    const std::map<std::string, std::string>& metadata);

/// The "weight_map" of an index: file names by tensor. Throws DataError.
std::map<std::string, std::string> parse_safetensors_index(const std::string& path,
                                                           const std::string& json);

}  // namespace headroom
