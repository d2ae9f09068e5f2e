#pragma once

#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// Names that begin with one of `prefixes`, of those that the loaded object (the program or a
/// library) around `address` has from other objects. Nothing where the system does not tell.
std::optional<std::vector<std::string>> imports_of(const void* address,
                                                   const std::vector<std::string>& prefixes);

}  // namespace headroom
