#pragma once

#include <string>

namespace headroom {

/// Tells data that was exchanged under the same name: the size of a file, with a SHA-256 of its
/// head and its tail; of a folder, that of its files with their names, the first few hundred in
/// order. Reads little, however large the data is. Empty when there is no such file or folder.
std::string data_fingerprint(const std::string& path);

}  // namespace headroom
