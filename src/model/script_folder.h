#pragma once

// TorchScript models as users name them: a file, or the folder that a run leaves.

#include <headroom/config/training_arguments.h>
#include <headroom/model/chain.h>
#include "model/model_format.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// A TorchScript file with what it does not say itself.
struct ScriptRequest {
  std::string path;
  std::string loss = "cross_entropy";  ///< a name of loss_names()
  std::string sizes = "";              ///< of the data that it reads: "k=v,..."
  /// Folders of adapters that are merged into it, in order.
  std::vector<std::string> adapters = {};
};

/// The TorchScript model that the arguments name: --model PATH.pt with --loss and --model_config,
/// a folder that was saved by script_format(), or one with adapters for such a folder. Nothing
/// where they name another kind of model. Throws DataError or ConfigError when a file of the folder
/// cannot be read.
std::optional<ScriptRequest> requested_script(const TrainingArguments& arguments);

/// The model as a chain that is saved by script_format(). `example` as for Chain::from_script,
/// which throws the same.
Chain load_script(const ScriptRequest& request, const MicroBatch& example);

/// Saves the model that a chain was cut from as model.pt, with a config.json by which
/// requested_script() knows the folder again.
std::shared_ptr<const ModelFormat> script_format(const ScriptRequest& request);

}  // namespace headroom
