#include "model/family.h"
#include "model/image_parts.h"

#include <fmt/format.h>

namespace headroom {
namespace {

namespace nn = torch::nn;

struct ResnetConfig : ImageConfig {
  std::int64_t blocks = 8;
  std::int64_t width = 16;
  std::int64_t norm = 1;    // 0: no BatchNorm
  std::int64_t stride = 2;  // of the stem
};

ConfigSetters setters_of(ResnetConfig& config) {
  ConfigSetters setters = image_setters(config);
  setters.insert({{"blocks", set_layers(config.blocks)},
                  {"width", set_size(config.width)},
                  {"norm", set_count(config.norm)},
                  {"stride", set_side(config.stride)}});
  return setters;
}

// Two 3x3 convolutions whose output is added to their input.
class ResidualBlockImpl : public nn::Module {
 public:
  ResidualBlockImpl(std::int64_t width, bool norm)
      : nn::Module(norm ? "ResidualBlock" : "PlainResidualBlock"),
        first_(register_module("first", Convolution(width, width, 3, 1, !norm))),
        second_(register_module("second", Convolution(width, width, 3, 1, !norm))) {
    if (norm) {
      first_norm_ = register_module("first_norm", nn::BatchNorm2d(width));
      second_norm_ = register_module("second_norm", nn::BatchNorm2d(width));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first_(x);
    y = second_(first_norm_ ? normalized(first_norm_, y, /*relu=*/true) : torch::relu(y));
    if (second_norm_) y = normalized(second_norm_, y);
    return torch::relu(x + y);
  }

 private:
  Convolution first_;
  Convolution second_;
  nn::BatchNorm2d first_norm_{nullptr};
  nn::BatchNorm2d second_norm_{nullptr};
};
TORCH_MODULE(ResidualBlock);

ZooModel make_resnet(const std::string& name, const std::string& text) {
  ResnetConfig config;
  read_config(name, text, setters_of(config));
  nn::Sequential network;
  network->push_back("stem", Convolution(config.channels, config.width, 3, config.stride, true));
  for (std::int64_t block = 0; block < config.blocks; ++block) {
    network->push_back(fmt::format("block{}", block),
                       ResidualBlock(config.width, config.norm != 0));
  }
  network->push_back("head", pooled_classifier(config.width, config.classes));
  return image_model(network, config, name, text);
}

}  // namespace

ModelFamily resnet_family() {
  ResnetConfig config;
  return {"residual blocks of two 3x3 convolutions",
          {"resnet"},
          keys_of(setters_of(config)),
          make_resnet,
          {own_model_type("resnet")},
          [](ConfigFile& file) { return make_resnet("resnet", own_sizes(file)); }};
}

}  // namespace headroom
