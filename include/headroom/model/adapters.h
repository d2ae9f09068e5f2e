#pragma once

#include <headroom/model/chain.h>
#include <headroom/model/pretrained.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// Low-rank adapters, as PEFT's LoraConfig has them.
struct LoraConfig {
  std::int64_t r = 8;
  double alpha = 8.0;    ///< what an adapter adds is multiplied by alpha / r
  double dropout = 0.0;  ///< of what an adapter is given
  /// Ends of Hugging Face's names of modules: "c_attn", "q_proj", "h.0.attn.c_attn"; or
  /// "all-linear". Of a TorchScript model, of its own names. Empty: what is usual for the model,
  /// and of a TorchScript model "all-linear".
  std::vector<std::string> target_modules;
};

/// Gives linear layers of the blocks of a transformer of the zoo, or of a TorchScript model, an
/// adapter each: y + alpha / r * up(down(dropout(x))), down drawn by LibTorch's default generator,
/// up 0. Every other parameter is frozen. save_pretrained then writes adapter_model.safetensors and
/// adapter_config.json in PEFT's layout; `base` is the folder of the model that was adapted.
/// Without one, and for a TorchScript model with buffers, which training may change, the model is
/// saved beside the adapters, in "base_model".
/// A TorchScript model is cut again: `example` as for Chain::from_script. Its whole model is then
/// the flattened graph with the adapters, uncut: compare the module itself (check_whole_model())
/// before adapters are added.
/// Throws ConfigError when the chain is neither or has adapters already, when r < 1, and, naming
/// the nearest, when a target is no linear layer that can have an adapter.
void add_adapters(Chain& chain, const LoraConfig& config, const std::string& base = {},
                  const MicroBatch& example = {});

/// Adds what the adapters add to the weights of their layers, and removes them: the same model to
/// rounding. The chain is saved as the model that it was. Does nothing without adapters.
void merge_adapters(Chain& chain);

/// True for a folder with adapter_config.json and no model of its own (config.json).
/// load_pretrained() gives such a folder's base model with the adapters merged into it.
bool is_adapter_folder(const std::string& folder);

/// The parameters that fit a pattern are no longer trained: they get no gradient and no optimizer
/// state. In a pattern "*" stands for any text; names are the chain's or Hugging Face's, and a
/// module's name stands for all of its parameters. Throws ConfigError when nothing fits a pattern,
/// or nothing is left to train.
void freeze(const Chain& chain, const std::vector<std::string>& patterns);

}  // namespace headroom
