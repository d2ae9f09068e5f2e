#pragma once

// The weights of a family of models under Hugging Face's names and in its shapes.

#include <headroom/model/zoo.h>
#include "model/config_file.h"
#include "model/model_format.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// What some parameters of a chain are called in a published model.
struct PublishedRow {
  /// A parameter ("head.bias") or a module, whose parameters keep the rest of their names. "*"
  /// stands for a number, here and in `theirs`.
  std::string ours;
  /// Several: ours is theirs, one under the other.
  std::vector<std::string> theirs;
  bool is_transposed = false;            ///< their matrices are (in, out), as Conv1D has them
  std::vector<std::int64_t> shape = {};  ///< theirs, where ours is a view of it
  std::vector<std::int64_t> rows = {};   ///< of each of theirs, where they are not equal in size
};

/// A family as a folder of Hugging Face's holds it.
struct PublishedForm {
  std::string config;              ///< the text of config.json
  std::vector<PublishedRow> rows;  ///< the first that fits counts; without any, names are ours
  std::string base;                ///< what files of the bare model leave out of the names: "bert."
  std::vector<std::string> head;   ///< starts of their names that a file may lack
  /// Second names of a tensor with the first; a file may have both, with the same values.
  std::vector<std::pair<std::string, std::string>> ties;
  /// Their names, with "*" for any text, of what is no weight of ours: masks, heads of other tasks.
  std::vector<std::string> ignored;
  /// A head of another size in the file is left out and the model's initialised, as one that is
  /// missing: the model is to have other classes.
  bool replaces_head = false;
};

/// Their names for a parameter of the chain.
std::vector<std::string> published_names(const PublishedForm& form, const std::string& ours);

/// Every weight and buffer of the chain by their names, as views in their shapes.
std::vector<std::pair<std::string, at::Tensor>> published_tensors(const PublishedForm& form,
                                                                  const Chain& chain);

/// Fills the chain from a folder's safetensors. A head that is missing there is initialised, which
/// one line on standard error says. Throws DataError, naming them, on tensors that are missing,
/// unexpected or of other shapes, before anything is changed; and on ties that differ.
void load_published(const PublishedForm& form, const Chain& chain, const std::string& folder);

/// Saves config.json and model.safetensors.
class PublishedFormat final : public ModelFormat {
 public:
  explicit PublishedFormat(PublishedForm form) : form_(std::move(form)) {}
  const PublishedForm& form() const { return form_; }
  SavedModel save(const Chain& chain, const std::string& folder) const override;

 private:
  PublishedForm form_;
};

/// The form of a model that nobody else has: names are those of the chain, and config.json holds
/// the sizes as "k=v,...". `model_type` is own_model_type("mlp"), say.
PublishedForm make_own_form(const std::string& model_type, const std::string& sizes);
std::string own_model_type(const std::string& family);
/// The sizes of such a config.json.
std::string own_sizes(ConfigFile& file);

/// Gives the chain this form.
void set_published_form(Chain& chain, PublishedForm form);
/// Puts the names of the classes and, for texts, the padding token into the config.json that the
/// chain is saved with. A chain without a form is left alone.
void set_label_names(Chain& chain, const std::vector<std::string>& names,
                     std::optional<std::int64_t> padding_token);
/// The names of the classes in a folder's config.json; empty where it has none.
std::vector<std::string> label_names_of(const std::string& folder);
/// The form of a chain that has one. Throws ConfigError otherwise.
const PublishedForm& published_form(const Chain& chain);

/// The model of a config.json: `make` gives it by its config struct, for which there are exchange()
/// and make_form().
template <class Config>
ZooModel read_published(ConfigFile& file, ZooModel (*make)(const Config&)) {
  Config config;
  exchange(file, config);
  ZooModel model = make(config);
  set_published_form(model.chain, make_form(config, file.for_writing()));
  return model;
}

/// While it lives, weights of the zoo that this thread makes are left without values: a file is
/// about to give them.
class UninitializedScope {
 public:
  UninitializedScope();
  ~UninitializedScope();
  UninitializedScope(const UninitializedScope&) = delete;
  UninitializedScope& operator=(const UninitializedScope&) = delete;

  static bool is_active();

 private:
  bool before_;
};

}  // namespace headroom
