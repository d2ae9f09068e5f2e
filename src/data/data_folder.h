#pragma once

// The parts of a folder with data: what is trained on, and what is evaluated on.

#include <string>
#include <vector>

namespace headroom {

/// The names in a folder, sorted by their bytes; hidden ones, which start with a dot, are left out.
/// Throws DataError when the folder cannot be listed.
std::vector<std::string> names_in(const std::string& folder);

/// What a folder of data holds as parts. Names are "train" and one of val, valid, validation, eval,
/// test; `ending` is "" for folders or that of a file (".csv").
struct DataParts {
  std::string train;  ///< its path; empty: the folder is not divided
  std::string eval;   ///< empty: there is none
};
DataParts parts_of(const std::string& folder, const std::string& ending = {});

}  // namespace headroom
