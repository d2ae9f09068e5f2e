#pragma once

#include <string>

namespace headroom {

class Chain;
struct SavedModel;

/// How a model is kept in a folder: which files, and what its weights are called there.
class ModelFormat {
 public:
  virtual ~ModelFormat() = default;

  /// Writes the model's files into an existing folder. Each appears whole or not at all, the one
  /// with the weights last. Throws ConfigError when they cannot be written.
  virtual SavedModel save(const Chain& chain, const std::string& folder) const = 0;
};

}  // namespace headroom
