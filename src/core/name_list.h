#pragma once

#include <string>
#include <vector>

namespace headroom {

/// The first names for a message, and how many more there are: "a, b, c and 12 more".
inline std::string name_list(const std::vector<std::string>& names, std::size_t most = 8) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < most; ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > most) text += " and " + std::to_string(names.size() - most) + " more";
  return text;
}

}  // namespace headroom
