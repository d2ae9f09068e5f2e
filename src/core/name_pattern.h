#pragma once

#include <string_view>

namespace headroom {

/// Does `text` fit a pattern in which "*" stands for any text, the empty one included?
inline bool fits_pattern(std::string_view pattern, std::string_view text) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == text;
  if (text.substr(0, star) != pattern.substr(0, star)) return false;
  for (std::size_t at = star; at <= text.size(); ++at) {
    if (fits_pattern(pattern.substr(star + 1), text.substr(at))) return true;
  }
  return false;
}

}  // namespace headroom
