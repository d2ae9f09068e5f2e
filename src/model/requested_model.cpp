#include "model/requested_model.h"

#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include "core/text.h"
#include "model/adapted_model.h"
#include "model/family.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

namespace headroom {
namespace {

ZooModel with_trained_parameters(ZooModel model, const TrainingArguments& arguments,
                                 const ModelHead& head) {
  choose_trained_parameters(model.chain, arguments, head);
  return model;
}

bool says(const std::string& config, const std::string& key) {
  const std::string start = key + "=";
  return starts_with(config, start) || config.find("," + start) != std::string::npos;
}

}  // namespace

std::string config_with_head(const std::string& model, const std::string& config,
                             const ModelHead& head) {
  if (head.kind != ModelHead::Kind::kClassifier) return config;
  const std::vector<std::string>& keys = family_of(model).keys;
  for (const char* key : {"num_labels", "classes"}) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) continue;
    if (says(config, key)) return config;
    return fmt::format("{}{}{}={}", config, config.empty() ? "" : ",", key, head.num_labels);
  }
  throw ConfigError(fmt::format("model {} does not classify", model));
}

ZooModel make_requested_model(const TrainingArguments& arguments, const ModelHead& head) {
  const std::string& folder = arguments.model_name_or_path;
  return with_trained_parameters(
      folder.empty() ? make_model(arguments.model,
                                  config_with_head(arguments.model, arguments.model_config, head))
                     : make_model_of(folder, head),
      arguments, head);
}

ZooModel load_requested_model(const TrainingArguments& arguments, const ModelHead& head) {
  const std::string& folder = arguments.model_name_or_path;
  if (folder.empty()) return make_requested_model(arguments, head);
  return with_trained_parameters(load_pretrained(folder, head), arguments, head);
}

void choose_trained_parameters(Chain& chain, const TrainingArguments& arguments,
                               const ModelHead& head, const MicroBatch& example) {
  if (arguments.lora_r > 0) {
    LoraConfig config;
    config.r = arguments.lora_r;
    config.alpha = arguments.lora_alpha;
    config.dropout = arguments.lora_dropout;
    config.target_modules = split(arguments.lora_target_modules, ',');
    // A classifier is no longer the model of the folder: it is saved beside the adapters.
    const bool has_own_head = head.kind == ModelHead::Kind::kClassifier;
    const std::string& base = arguments.model_name_or_path;
    add_adapters(chain, config,
                 base.empty() || has_own_head
                     ? std::string()
                     : std::filesystem::absolute(base).lexically_normal().string(),
                 example);
    if (has_own_head) train_head(chain);
  }
  if (!arguments.freeze.empty()) freeze(chain, split(arguments.freeze, ','));
}

}  // namespace headroom
