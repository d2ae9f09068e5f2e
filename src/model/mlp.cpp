#include "model/family.h"
#include "model/image_parts.h"
#include "ops/linear.h"

#include <fmt/format.h>

namespace headroom {
namespace {

namespace nn = torch::nn;

struct MlpConfig : ImageConfig {
  std::int64_t hidden = 512;
  std::int64_t layers = 2;
};

ConfigSetters setters_of(MlpConfig& config) {
  ConfigSetters setters = image_setters(config);
  setters.insert({{"hidden", set_size(config.hidden)}, {"layers", set_count(config.layers)}});
  return setters;
}

// Flattens what it is given, then a linear layer that writes its gradients directly, with a ReLU
// unless it is the last one.
class DenseImpl : public nn::Module {
 public:
  DenseImpl(std::int64_t in, std::int64_t out, bool relu)
      : nn::Module(relu ? "DenseRelu" : "Dense"), relu_(relu) {
    // The initial values are nn::Linear's.
    const nn::Linear linear(in, out);
    weight_ = register_parameter("weight", linear->weight.detach());
    bias_ = register_parameter("bias", linear->bias.detach());
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor rows = x.dim() == 2 ? x : x.flatten(1);
    return relu_ ? linear_relu(rows, weight_, bias_) : linear(rows, weight_, bias_);
  }

 private:
  bool relu_;
  at::Tensor weight_;
  at::Tensor bias_;
};
TORCH_MODULE(Dense);

ZooModel make_mlp(const std::string& name, const std::string& text) {
  MlpConfig config;
  read_config(name, text, setters_of(config));
  nn::Sequential network;
  std::int64_t width = config.channels * config.rows * config.columns;
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    network->push_back(fmt::format("hidden{}", layer), Dense(width, config.hidden, true));
    width = config.hidden;
  }
  network->push_back("head", Dense(width, config.classes, false));
  return image_model(network, config, name, text);
}

}  // namespace

ModelFamily mlp_family() {
  MlpConfig config;
  return {"linear layers with ReLU",
          {"mlp"},
          keys_of(setters_of(config)),
          make_mlp,
          {own_model_type("mlp")},
          [](ConfigFile& file) { return make_mlp("mlp", own_sizes(file)); }};
}

}  // namespace headroom
