#pragma once

#include <headroom/model/zoo.h>

#include <string>

namespace headroom {

/// A model in a folder, as Hugging Face's from_pretrained and save_pretrained have it: config.json
/// and model.safetensors, or several files with model.safetensors.index.json. Folders may come from
/// there (GPT-2, BERT, ViT, CLIP, Llama, Qwen2) or from here.

/// The model that config.json describes, with the weights of the folder, converted to fp32. What
/// the folder lacks of a head is drawn anew by LibTorch's default generator, which one line on
/// standard error says. Memory: the weights, and about a MiB. Throws DataError when files are
/// missing or malformed, or tensors are missing, unexpected or of other shapes; ConfigError when
/// the architecture or a value of config.json cannot be served.
ZooModel load_pretrained(const std::string& folder);

/// What a model ends in, where that is not what its folder says.
struct ModelHead {
  enum class Kind {
    kAsSaved,
    kLanguageModel,
    kClassifier,  ///< of texts or images, with `num_labels` classes
  };
  Kind kind = Kind::kAsSaved;
  std::int64_t num_labels = 0;
};

/// The same with another head, which is drawn anew as far as the folder does not have it: a
/// classifier from a language model, or one with other classes.
ZooModel load_pretrained(const std::string& folder, const ModelHead& head);

/// The same model by config.json alone, with random weights.
ZooModel make_model_of(const std::string& folder, const ModelHead& head = {});

/// Fills a chain of your own with the weights of a folder or file: those that save_pretrained wrote
/// of the same chain. Throws as load_pretrained.
void load_weights(const Chain& chain, const std::string& path);

struct SavedModel {
  std::string file;    ///< the one with the weights, in the folder: "model.safetensors"
  std::string sha256;  ///< of it
};

/// Saves the model so that load_pretrained, and for the transformers of the zoo Hugging Face, can
/// read it. A chain of your own is saved under its own names, for load_weights. The folder is made
/// when it is not there. Files appear whole or not at all. Takes about a MiB beside the weights.
/// Throws ConfigError when the folder cannot be written.
SavedModel save_pretrained(const Chain& chain, const std::string& folder);

}  // namespace headroom
