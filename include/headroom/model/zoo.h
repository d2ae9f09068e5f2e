#pragma once

#include <headroom/core/micro_batch.h>
#include <headroom/model/chain.h>

#include <string>
#include <vector>

namespace headroom {

/// A model with what it reads.
struct ZooModel {
  Chain chain;
  ModelInput input;
};

/// Makes a model by its name, with random weights by LibTorch's default generator. `config` is
/// "k=v,..." with the sizes that differ from the defaults. Throws ConfigError, naming the nearest
/// name or key, on what it does not know, and on sizes out of range.
///
/// name                                              keys
/// mlp                                               hidden=512, layers=2
/// nin                                               width=32
/// resnet                                            blocks=8, width=16, norm=1, stride=2
/// vit, vit-b16, vit-l16                             Hugging Face's, as docs/models.md says
/// bert, bert-base, bert-large                       Hugging Face's
/// clip, clip-vit-b32                                Hugging Face's after vision_ and text_
/// gpt, gpt2, gpt2-medium, gpt2-large, gpt2-xl       nanoGPT's: see headroom/model/gpt.h
/// llama, llama-3.2-1b, qwen2-0.5b, tinyllama-1.1b   Hugging Face's, as docs/models.md says
///
/// Image models also take channels, rows, columns and classes.
ZooModel make_model(const std::string& name, const std::string& config);

/// Every name that make_model knows.
std::vector<std::string> model_names();

}  // namespace headroom
