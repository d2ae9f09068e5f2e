#pragma once

// The table of model families. To add one: a file with its models and its row, and a line in
// zoo.cpp.

#include <headroom/model/zoo.h>

#include <string>
#include <vector>

namespace headroom {

class ConfigFile;

/// Models that share code and keys and differ in sizes.
struct ModelFamily {
  std::string help;                ///< what they are, in a few words
  std::vector<std::string> names;  ///< what make_model takes
  std::vector<std::string> keys;   ///< of their "k=v,..."
  /// `name` is one of `names`. Throws ConfigError on a config that does not fit.
  ZooModel (*make)(const std::string& name, const std::string& config);
  std::vector<std::string> model_types;  ///< in the config.json of a saved one
  /// The model that a config.json describes, as read. Throws ConfigError on what cannot be served.
  ZooModel (*read)(ConfigFile& file);
};

/// Every family, in the order of the documentation.
const std::vector<ModelFamily>& model_families();

/// The family that has a model of this name. Throws ConfigError, naming the nearest, when none has.
const ModelFamily& family_of(const std::string& name);

ModelFamily mlp_family();
ModelFamily nin_family();
ModelFamily resnet_family();
ModelFamily vit_family();
ModelFamily bert_family();
ModelFamily clip_family();
ModelFamily gpt_family();
ModelFamily llama_family();

}  // namespace headroom
