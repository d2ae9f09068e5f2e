// Running on shapes alone allocates what running on memory does.
#include "memory/shape_meter.h"
#include <headroom/memory/meter.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace headroom {
namespace {

namespace nn = torch::nn;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

struct Bytes {
  std::int64_t kept = 0;
  std::int64_t peak_forward = 0;
  std::int64_t peak_backward = 0;
};

constexpr std::int64_t kScalarBytes =
    16;  // of a number that an operator is given: these are on the CPU wherever the tensors are

void expect_peak(std::int64_t counted, std::int64_t measured, std::int64_t count,
                 const std::string& what) {
  EXPECT_GE(counted + kScalarBytes, measured) << what << " of " << count;
  EXPECT_LE(counted, measured + 1024 + measured / 50) << what << " of " << count;
}

template <typename Meter>
Bytes run(Meter& meter, nn::Module& module, const Forward& forward, const at::Tensor& input) {
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
  Bytes bytes;
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  at::Tensor output = forward(input);
  bytes.kept = meter.live_bytes() - before;
  bytes.peak_forward = meter.peak_bytes() - before;
  at::Tensor gradient = torch::ones_like(output);
  meter.reset_peak();
  output.backward(gradient);
  bytes.peak_backward = meter.peak_bytes() - before;
  output = gradient = at::Tensor();
  for (at::Tensor& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
  return bytes;
}

template <typename Holder>
void expect_same_bytes(const std::string& name, Holder module,
                       const std::vector<std::int64_t>& sample, bool indices = false,
                       const std::vector<std::int64_t>& counts = {1, 2, 3, 8, 20, 33}) {
  const Forward forward = [&](const at::Tensor& x) { return module->forward(x); };
  for (const std::int64_t count : counts) {
    std::vector<std::int64_t> sizes = sample;
    sizes.insert(sizes.begin(), count);
    const at::Tensor input =
        indices ? torch::zeros(sizes, torch::kLong) : torch::randn(sizes).requires_grad_();
    run(MemoryMeter::instance(), *module, forward, input);  // the first run sets kernels up
    if (!indices) input.mutable_grad() = torch::zeros_like(input);
    const Bytes measured = run(MemoryMeter::instance(), *module, forward, input);
    std::vector<at::Tensor> tensors = module->parameters();
    for (const at::Tensor& buffer : module->buffers()) tensors.push_back(buffer);
    const MetaSwapScope without(tensors);
    at::Tensor shape = shape_of(input);
    if (!indices) {
      shape.requires_grad_();
      shape.mutable_grad() = torch::zeros_like(shape);
    }
    const Bytes counted = run(ShapeMeter::instance(), *module, forward, shape);
    EXPECT_EQ(counted.kept, measured.kept) << name << " of " << count;
    expect_peak(counted.peak_forward, measured.peak_forward, count, name + " forward");
    expect_peak(counted.peak_backward, measured.peak_backward, count, name + " backward");
  }
}

TEST(ShapeMeter, OperatorsAllocateTheSameBytes) {
  MemoryMeter::instance();
  expect_same_bytes("linear", nn::Linear(24, 40), {24});
  expect_same_bytes("relu", nn::ReLU(), {24});
  expect_same_bytes("layer norm", nn::LayerNorm(nn::LayerNormOptions({24})), {5, 24});
  expect_same_bytes("batch norm", nn::BatchNorm2d(12), {12, 6, 6});
  expect_same_bytes("embedding", nn::Embedding(50, 16), {7}, true);
  expect_same_bytes("average pool", nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(2)),
                    {4, 8, 8});
  expect_same_bytes("pool to one", nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions(1)),
                    {4, 8, 8});
  expect_same_bytes("max pool", nn::MaxPool2d(2), {4, 8, 8});
}

TEST(ShapeMeter, ConvolutionsAllocateTheSameBytes) {
  MemoryMeter::instance();
  for (const bool bias : {false, true}) {
    for (const std::int64_t kernel : {1, 3, 5}) {
      for (const std::int64_t stride : {1, 2}) {
        const auto options =
            nn::Conv2dOptions(5, 12, kernel).stride(stride).padding(kernel / 2).bias(bias);
        expect_same_bytes(fmt::format("convolution {} stride {} bias {}", kernel, stride, bias),
                          nn::Conv2d(options), {5, 14, 14});
      }
    }
  }
  expect_same_bytes("wide convolution", nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1)),
                    {32, 28, 28});
  expect_same_bytes("more than is run", nn::Conv2d(32, 64, 1), {32, 64, 64}, false, {50, 90});
  expect_same_bytes("grouped convolution", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).groups(4)),
                    {8, 10, 10});
}

TEST(ShapeMeter, AModelBuiltInTheScopeHasSizesAndNoMemory) {
  MemoryMeter& meter = MemoryMeter::instance();
  ShapeMeter& shapes = ShapeMeter::instance();
  meter.reset_peak();
  const std::int64_t live = meter.live_bytes(), shape_bytes = shapes.live_bytes();
  nn::Linear linear{nullptr};
  {
    const ShapeOnlyScope scope;
    linear = nn::Linear(100'000, 10'000);
  }
  EXPECT_EQ(meter.peak_bytes(), live);
  EXPECT_TRUE(linear->weight.is_meta() && linear->weight.is_leaf() &&
              linear->weight.requires_grad());
  EXPECT_EQ(shapes.live_bytes() - shape_bytes, 4LL * 10'000 * 100'001);
  EXPECT_TRUE(torch::zeros({2}).is_cpu()) << "outside of the scope";
}

TEST(ShapeMeter, TensorsGetTheirContentsBack) {
  nn::Linear linear(4, 4);
  const at::Tensor before = linear->weight.detach().clone();
  const auto version = linear->weight._version();
  {
    const MetaSwapScope without(linear->parameters());
    EXPECT_TRUE(linear->weight.is_meta() && linear->weight.requires_grad());
    linear(torch::empty({2, 4}, torch::kMeta)).sum().backward();
    linear->zero_grad();
    for (at::Tensor& parameter : linear->parameters()) parameter.mutable_grad() = at::Tensor();
  }
  EXPECT_TRUE(torch::equal(linear->weight, before));
  EXPECT_EQ(linear->weight._version(), version);
  linear(torch::ones({2, 4})).sum().backward();
  EXPECT_TRUE(linear->weight.grad().is_cpu());
}

}  // namespace
}  // namespace headroom
