#include <headroom/model/pretrained.h>

#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include "core/input_file.h"
#include "model/adapted_model.h"
#include "model/adapter_folder.h"
#include "model/family.h"
#include "model/published.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>

namespace headroom {
namespace {

namespace fs = std::filesystem;

const std::string& own_chain_type() {
  static const std::string type = own_model_type("chain");
  return type;
}

}  // namespace

ZooModel make_model_of(const std::string& folder, const ModelHead& head) {
  if (!is_folder(folder)) {
    throw DataError(
        fmt::format("'{}' is no folder: download the model (config.json, "
                    "model.safetensors) and name its folder",
                    shown_path(folder)));
  }
  if (is_adapter_folder(folder)) return make_model_of(base_of_adapters(folder), head);
  ConfigFile file = ConfigFile::read((fs::path(folder) / "config.json").string());
  if (head.kind != ModelHead::Kind::kAsSaved)
    file.ask_for_labels(head.kind == ModelHead::Kind::kClassifier ? head.num_labels : 0);
  std::string type;
  file.word("model_type", type, "");
  std::vector<std::string> known;
  for (const ModelFamily& family : model_families()) {
    for (const std::string& one : family.model_types) {
      if (one == type) return family.read(file);
      known.push_back(one);
    }
  }
  if (type == own_chain_type()) {
    throw ConfigError(
        fmt::format("'{}' holds the weights of a program's own chain: that program "
                    "reads them with headroom::load_weights",
                    folder));
  }
  throw ConfigError(fmt::format("'{}/config.json' is of model_type '{}'; known: {}", folder, type,
                                fmt::join(known, ", ")));
}

ZooModel load_pretrained(const std::string& folder) { return load_pretrained(folder, {}); }

ZooModel load_pretrained(const std::string& folder, const ModelHead& head) {
  if (is_adapter_folder(folder)) {
    ZooModel model = load_pretrained(base_of_adapters(folder), head);
    load_and_merge_adapters(model.chain, folder);
    return model;
  }
  ZooModel model = [&] {
    const UninitializedScope scope;
    return make_model_of(folder, head);
  }();
  PublishedForm form = published_form(model.chain);
  form.replaces_head = head.kind == ModelHead::Kind::kClassifier;
  load_published(form, model.chain, folder);
  return model;
}

void load_weights(const Chain& chain, const std::string& path) {
  load_published(chain.format() ? published_form(chain) : PublishedForm(), chain, path);
}

SavedModel save_pretrained(const Chain& chain, const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw ConfigError(fmt::format("'{}' cannot be made: {}", folder, error.message()));
  if (chain.format()) return chain.format()->save(chain, folder);
  return PublishedFormat(make_own_form(own_chain_type(), "")).save(chain, folder);
}

}  // namespace headroom
