#pragma once

// TorchScript models as users name them: a file, or the folder that a run leaves.

#include <headroom/config/training_arguments.h>
#include "model/model_format.h"

#include <memory>
#include <optional>
#include <string>

namespace headroom {

/// A TorchScript file with what it does not say itself.
struct ScriptRequest {
  std::string path;
  std::string loss;   ///< a name of loss_names()
  std::string sizes;  ///< of the data that it reads: "k=v,..."
};

/// The TorchScript model that the arguments name: --model PATH.pt with --loss and --model_config,
/// or a folder that was saved by script_format(). Nothing where they name another kind of model.
/// Throws DataError or ConfigError when the folder's config.json cannot be read.
std::optional<ScriptRequest> requested_script(const TrainingArguments& arguments);

/// Saves the model that a chain was cut from as model.pt, with a config.json by which
/// requested_script() knows the folder again.
std::shared_ptr<const ModelFormat> script_format(const ScriptRequest& request);

}  // namespace headroom
