#include <headroom/model/zoo.h>

#include <headroom/core/error.h>
#include "core/nearest_name.h"
#include "model/family.h"

#include <algorithm>

namespace headroom {

const std::vector<ModelFamily>& model_families() {
  static const std::vector<ModelFamily> families = {mlp_family(), nin_family(),  resnet_family(),
                                                    vit_family(), bert_family(), clip_family(),
                                                    gpt_family(), llama_family()};
  return families;
}

const ModelFamily& family_of(const std::string& name) {
  for (const ModelFamily& family : model_families()) {
    if (std::find(family.names.begin(), family.names.end(), name) != family.names.end())
      return family;
  }
  throw ConfigError(unknown_name("model", name, model_names()));
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const ModelFamily& family : model_families())
    names.insert(names.end(), family.names.begin(), family.names.end());
  return names;
}

ZooModel make_model(const std::string& name, const std::string& config) {
  return family_of(name).make(name, config);
}

}  // namespace headroom
