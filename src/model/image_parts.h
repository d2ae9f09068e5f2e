#pragma once

// What the image classifiers of the zoo are made of.

#include <headroom/model/zoo.h>
#include "model/config_text.h"
#include "model/published.h"

#include <torch/torch.h>

#include <cstdint>

namespace headroom {

/// The images that a classifier reads. The defaults are FashionMNIST's.
struct ImageConfig {
  std::int64_t channels = 1;
  std::int64_t rows = 28;
  std::int64_t columns = 28;
  std::int64_t classes = 10;
};

/// The keys of an ImageConfig.
ConfigSetters image_setters(ImageConfig& config);

ModelInput image_input(const ImageConfig& config);

/// A chain of the network's children that ends in the cross-entropy summed over the samples. Saved
/// as the model `name` with the sizes `text`, from which the network was made.
ZooModel image_model(const torch::nn::Sequential& network, const ImageConfig& config,
                     const std::string& name, const std::string& text);

/// Layers that run one after the other as one stage. (A Sequential cannot be a child of a
/// Sequential: its forward is a template.)
class LayersImpl : public torch::nn::SequentialImpl {
 public:
  using torch::nn::SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) { return torch::nn::SequentialImpl::forward(x); }
};
TORCH_MODULE(Layers);

/// A convolution that keeps rows and columns at stride 1; `kernel` is odd. Has the parameters and
/// the bits of LibTorch's, and holds less in backward.
class ConvolutionImpl : public torch::nn::Conv2dImpl {
 public:
  ConvolutionImpl(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride,
                  bool has_bias);
  at::Tensor forward(const at::Tensor& x);
};
TORCH_MODULE(Convolution);

/// norm(x), or its positive part, in less time and with the same bits.
at::Tensor normalized(torch::nn::BatchNorm2d& norm, const at::Tensor& x, bool relu = false);

/// (B, width, rows, columns) to (B, num_classes): the mean over the places, then a linear layer.
Layers pooled_classifier(std::int64_t width, std::int64_t num_classes);

}  // namespace headroom
