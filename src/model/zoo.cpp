#include <headroom/model/zoo.h>

#include <headroom/config/training_arguments.h>
#include <headroom/core/error.h>
#include <headroom/model/gpt.h>
#include "model/bert.h"
#include "model/clip.h"
#include "model/vit.h"
#include "ops/linear.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <charconv>
#include <functional>

namespace headroom {
namespace {

using Sizes = std::map<std::string, std::int64_t>;
namespace nn = torch::nn;

Sizes with_image_sizes(Sizes sizes) {
  sizes.insert({{"channels", 1}, {"rows", 28}, {"columns", 28}, {"classes", 10}});
  return sizes;
}

ModelInput image_input(const Sizes& sizes) {
  ModelInput input;
  input.channels = sizes.at("channels");
  input.rows = sizes.at("rows");
  input.columns = sizes.at("columns");
  input.num_classes = sizes.at("classes");
  return input;
}

// Layers that run one after the other as one stage. (A Sequential cannot be a child of a
// Sequential: its forward is a template.)
class LayersImpl : public nn::SequentialImpl {
 public:
  using nn::SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Layers);

// Flattens what it is given, then a linear layer that writes its gradients directly, then a ReLU in
// place unless it is the last one.
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
    at::Tensor y = linear(x.flatten(1), weight_, bias_);
    return relu_ ? y.relu_() : y;
  }

 private:
  bool relu_;
  at::Tensor weight_;
  at::Tensor bias_;
};
TORCH_MODULE(Dense);

ZooModel make_mlp(const std::string& config) {
  const Sizes sizes =
      parse_sizes("mlp", config, with_image_sizes({{"hidden", 512}, {"layers", 2}}));
  const ModelInput input = image_input(sizes);
  nn::Sequential network;
  std::int64_t width = input.channels * input.rows * input.columns;
  for (std::int64_t layer = 0; layer < sizes.at("layers"); ++layer) {
    network->push_back(fmt::format("hidden{}", layer), Dense(width, sizes.at("hidden"), true));
    width = sizes.at("hidden");
  }
  network->push_back("head", Dense(width, input.num_classes, false));
  return {Chain::from_sequential(network.ptr(), summed_cross_entropy, true), input};
}

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride,
                       bool bias) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(bias));
}

// A spatial convolution and a 1x1 convolution, each with BatchNorm and ReLU.
Layers nin_block(std::int64_t in, std::int64_t out, std::int64_t stride) {
  return Layers(convolution(in, out, 3, stride, false), nn::BatchNorm2d(out), nn::ReLU(),
                convolution(out, out, 1, 1, false), nn::BatchNorm2d(out), nn::ReLU());
}

Layers pooled_classifier(std::int64_t width, std::int64_t num_classes) {
  return Layers(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)), nn::Flatten(),
                nn::Linear(width, num_classes));
}

ZooModel make_nin(const std::string& config) {
  const Sizes sizes = parse_sizes("nin", config, with_image_sizes({{"width", 32}}));
  const ModelInput input = image_input(sizes);
  const std::int64_t width = sizes.at("width");
  nn::Sequential network;
  network->push_back("block0", nin_block(input.channels, width, 1));
  network->push_back("block1", nin_block(width, 2 * width, 2));
  network->push_back("block2", nin_block(2 * width, 4 * width, 2));
  network->push_back("head", pooled_classifier(4 * width, input.num_classes));
  return {Chain::from_sequential(network.ptr(), summed_cross_entropy, true), input};
}

class ResidualBlockImpl : public nn::Module {
 public:
  ResidualBlockImpl(std::int64_t width, bool norm)
      : nn::Module(norm ? "ResidualBlock" : "PlainResidualBlock"),
        first_(register_module("first", convolution(width, width, 3, 1, !norm))),
        second_(register_module("second", convolution(width, width, 3, 1, !norm))) {
    if (norm) {
      first_norm_ = register_module("first_norm", nn::BatchNorm2d(width));
      second_norm_ = register_module("second_norm", nn::BatchNorm2d(width));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = first_(x);
    if (first_norm_) y = first_norm_(y);
    y = second_(torch::relu(y));
    if (second_norm_) y = second_norm_(y);
    return torch::relu(x + y);
  }

 private:
  nn::Conv2d first_;
  nn::Conv2d second_;
  nn::BatchNorm2d first_norm_{nullptr};
  nn::BatchNorm2d second_norm_{nullptr};
};
TORCH_MODULE(ResidualBlock);

ZooModel make_resnet(const std::string& config) {
  const Sizes sizes =
      parse_sizes("resnet", config,
                  with_image_sizes({{"blocks", 8}, {"width", 16}, {"norm", 1}, {"stride", 2}}));
  const ModelInput input = image_input(sizes);
  const std::int64_t width = sizes.at("width");
  nn::Sequential network;
  network->push_back("stem", convolution(input.channels, width, 3, sizes.at("stride"), true));
  for (std::int64_t block = 0; block < sizes.at("blocks"); ++block) {
    network->push_back(fmt::format("block{}", block), ResidualBlock(width, sizes.at("norm") != 0));
  }
  network->push_back("head", pooled_classifier(width, input.num_classes));
  return {Chain::from_sequential(network.ptr(), summed_cross_entropy, true), input};
}

ZooModel make_zoo_gpt(const std::string& name, const std::string& text) {
  const GptConfig config = gpt_config(name, text);
  ModelInput input;
  input.kind = ModelInput::Kind::kTokens;
  input.length = config.block_size;
  input.vocabulary = config.vocab_size;
  return {make_gpt(config), input};
}

ZooModel make_zoo_bert(const std::string& name, const std::string& text) {
  const BertConfig config = bert_config(name, text);
  ModelInput input;
  input.kind = ModelInput::Kind::kTokens;
  input.length = config.length;
  input.vocabulary = config.vocab_size;
  input.num_masked = num_masked(config);
  input.mask_token = config.mask_token;
  return {make_bert(config), input};
}

ZooModel make_zoo_vit(const std::string& name, const std::string& text) {
  const VitConfig config = vit_config(name, text);
  ModelInput input;
  input.channels = config.channels;
  input.rows = config.rows;
  input.columns = config.columns;
  input.num_classes = config.classes;
  return {make_vit(config), input};
}

ZooModel make_zoo_clip(const std::string& name, const std::string& text) {
  const ClipConfig config = clip_config(name, text);
  ModelInput input;
  input.kind = ModelInput::Kind::kPairs;
  input.channels = config.channels;
  input.rows = config.rows;
  input.columns = config.columns;
  input.length = config.length;
  input.vocabulary = config.vocab_size;
  return {make_clip(config), input};
}

using Makers = std::map<std::string, std::function<ZooModel(const std::string&)>>;

const Makers& makers() {
  static const Makers table = [] {
    Makers all{{"mlp", make_mlp}, {"nin", make_nin}, {"resnet", make_resnet}};
    const auto add = [&](const std::vector<std::string>& names,
                         ZooModel (*make)(const std::string&, const std::string&)) {
      for (const std::string& name : names)
        all[name] = [=](const std::string& config) { return make(name, config); };
    };
    add(gpt_names(), make_zoo_gpt);
    add(vit_names(), make_zoo_vit);
    add(bert_names(), make_zoo_bert);
    add(clip_names(), make_zoo_clip);
    return all;
  }();
  return table;
}

}  // namespace

std::map<std::string, std::int64_t> parse_sizes(const std::string& model, const std::string& text,
                                                Sizes defaults) {
  std::size_t start = 0;
  while (start < text.size()) {
    const std::size_t end = std::min(text.find(',', start), text.size());
    const std::string pair = text.substr(start, end - start);
    const std::size_t equals = pair.find('=');
    if (equals == std::string::npos)
      throw ConfigError(fmt::format("--model_config '{}': expected k=v, found '{}'", text, pair));
    const std::string key = pair.substr(0, equals);
    const std::string value = pair.substr(equals + 1);
    const auto found = defaults.find(key);
    if (found == defaults.end()) {
      std::vector<std::string> names;
      for (const auto& entry : defaults) names.push_back(entry.first);
      throw ConfigError(fmt::format("--model_config: {} has no size '{}'; did you mean '{}'?",
                                    model, key, nearest_name(key, names)));
    }
    std::int64_t number = 0;
    const auto [stop, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || stop != value.data() + value.size() || number < 0 ||
        number > (std::int64_t{1} << 30)) {
      throw ConfigError(
          fmt::format("--model_config: {}='{}' is not a whole number from 0 to 2^30", key, value));
    }
    found->second = number;
    start = end + 1;
  }
  for (const auto& [key, value] : defaults) {
    if (value == 0 && key != "norm" && key != "layers")
      throw ConfigError(fmt::format("--model_config: {} must be above 0", key));
  }
  return defaults;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& entry : makers()) names.push_back(entry.first);
  return names;
}

ZooModel make_model(const std::string& name, const std::string& config) {
  const auto found = makers().find(name);
  if (found == makers().end()) {
    throw ConfigError(fmt::format("--model '{}': expected one of {}; did you mean '{}'?", name,
                                  fmt::join(model_names(), ", "),
                                  nearest_name(name, model_names())));
  }
  return found->second(config);
}

}  // namespace headroom
