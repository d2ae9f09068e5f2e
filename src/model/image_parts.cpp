#include "model/image_parts.h"

#include "ops/batch_norm.h"
#include "ops/lean_operators.h"

#include <vector>

namespace headroom {

namespace nn = torch::nn;

ConfigSetters image_setters(ImageConfig& config) {
  return {{"channels", set_side(config.channels)},
          {"rows", set_side(config.rows)},
          {"columns", set_side(config.columns)},
          {"classes", set_size(config.classes)}};
}

ModelInput image_input(const ImageConfig& config) {
  ModelInput input;
  input.channels = config.channels;
  input.rows = config.rows;
  input.columns = config.columns;
  input.num_classes = config.classes;
  if (config.channels == 3) {  // ImageNet's
    input.pixel_mean = {0.485, 0.456, 0.406};
    input.pixel_deviation = {0.229, 0.224, 0.225};
  }
  return input;
}

ZooModel image_model(const nn::Sequential& network, const ImageConfig& config,
                     const std::string& name, const std::string& text) {
  Chain chain = Chain::from_sequential(network.ptr(), summed_cross_entropy, true);
  set_published_form(chain, make_own_form(own_model_type(name), text));
  return {chain, image_input(config)};
}

ConvolutionImpl::ConvolutionImpl(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                 std::int64_t stride, bool has_bias)
    : Conv2dImpl(
          nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(has_bias)) {}

at::Tensor ConvolutionImpl::forward(const at::Tensor& x) {
  const std::vector<std::int64_t> padding{weight.size(2) / 2, weight.size(3) / 2};
  return lean_convolution(x, weight, bias, options.stride(), padding, options.dilation(),
                          options.groups());
}

at::Tensor normalized(nn::BatchNorm2d& norm, const at::Tensor& x, bool relu) {
  // A single value in a channel is an error that LibTorch words.
  const bool has_statistics = x.numel() > x.size(1);
  if (!norm->is_training() || !has_statistics || !norm->options.momentum()) {
    const at::Tensor y = norm(x);
    return relu ? at::relu(y) : y;
  }
  norm->num_batches_tracked += 1;
  return batch_norm(x, norm->weight, norm->bias, norm->running_mean, norm->running_var,
                    *norm->options.momentum(), norm->options.eps(), relu)
      .y;
}

Layers pooled_classifier(std::int64_t width, std::int64_t num_classes) {
  return Layers(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)), nn::Flatten(),
                nn::Linear(width, num_classes));
}

}  // namespace headroom
