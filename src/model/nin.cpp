#include "model/family.h"
#include "model/image_parts.h"

namespace headroom {
namespace {

namespace nn = torch::nn;

struct NinConfig : ImageConfig {
  std::int64_t width = 32;
};

ConfigSetters setters_of(NinConfig& config) {
  ConfigSetters setters = image_setters(config);
  setters.insert({{"width", set_size(config.width)}});
  return setters;
}

// A spatial convolution and a 1x1 convolution, each with BatchNorm and ReLU.
Layers nin_block(std::int64_t in, std::int64_t out, std::int64_t stride) {
  return Layers(Convolution(in, out, 3, stride, false), nn::BatchNorm2d(out), nn::ReLU(),
                Convolution(out, out, 1, 1, false), nn::BatchNorm2d(out), nn::ReLU());
}

ZooModel make_nin(const std::string& name, const std::string& text) {
  NinConfig config;
  read_config(name, text, setters_of(config));
  const std::int64_t width = config.width;
  nn::Sequential network;
  network->push_back("block0", nin_block(config.channels, width, 1));
  network->push_back("block1", nin_block(width, 2 * width, 2));
  network->push_back("block2", nin_block(2 * width, 4 * width, 2));
  network->push_back("head", pooled_classifier(4 * width, config.classes));
  return image_model(network, config, name, text);
}

}  // namespace

ModelFamily nin_family() {
  NinConfig config;
  return {"convolutions and 1x1 convolutions with BatchNorm",
          {"nin"},
          keys_of(setters_of(config)),
          make_nin,
          {own_model_type("nin")},
          [](ConfigFile& file) { return make_nin("nin", own_sizes(file)); }};
}

}  // namespace headroom
