#pragma once

#include <headroom/model/chain.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace headroom {

/// What a model of the zoo reads.
struct ModelInput {
  enum class Kind { kImages, kTokens, kPairs };  ///< pairs: an image and tokens
  Kind kind = Kind::kImages;
  std::int64_t channels = 1;
  std::int64_t rows = 28;
  std::int64_t columns = 28;
  std::int64_t num_classes = 10;
  std::int64_t length = 0;  ///< tokens per sample
  std::int64_t vocabulary = 0;
  std::int64_t num_masked = 0;  ///< tokens per sample that a masked-language model is to guess; 0:
                                ///< it guesses each token's next one
  std::int64_t mask_token = 0;
};

struct ZooModel {
  Chain chain;
  ModelInput input;
};

/// Makes a model by its name, with random weights by LibTorch's default generator. `config` is
/// "k=v,...". Throws ConfigError, naming the nearest name or key, on what it does not know.
///   mlp     hidden=512, layers=2: 784-512-512-10 with ReLU
///   nin     width=32: convolutions and 1x1 convolutions with BatchNorm, global average pooling
///   resnet  blocks=8, width=16, norm=1: residual blocks of two 3x3 convolutions, with BatchNorm
///   when norm=1 vit, vit-b16, vit-l16                         see model/vit.h bert, bert-base,
///   bert-large                   see model/bert.h clip, clip-vit-b32 see model/clip.h gpt, gpt2,
///   gpt2-medium, gpt2-large, gpt2-xl   see model/gpt.h
/// Image models also take channels, rows, columns and classes.
ZooModel make_model(const std::string& name, const std::string& config);

/// Every name that make_model knows.
std::vector<std::string> model_names();

/// "k=v,..." as a map of whole numbers, starting from `defaults`, whose keys are the only ones
/// allowed. Throws ConfigError.
std::map<std::string, std::int64_t> parse_sizes(const std::string& model, const std::string& text,
                                                std::map<std::string, std::int64_t> defaults);

}  // namespace headroom
