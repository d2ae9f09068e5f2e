// An existing LibTorch model, made checkpointed by changing one line.
//
// The model below is an ordinary torch::nn::Module. Its forward runs a list of blocks; each block's
// activations stay in memory until backward. With headroom::checkpoint around the call, only the
// blocks' inputs do: the rest is computed again in backward.

#include <headroom/execute/checkpoint.h>
#include <headroom/memory/meter.h>

#include <torch/torch.h>

#include <cstdio>

struct NetImpl : torch::nn::Module {
  NetImpl(int num_blocks, int width) {
    for (int i = 0; i < num_blocks; ++i) {
      blocks->push_back(
          torch::nn::Sequential(torch::nn::Linear(width, 4 * width), torch::nn::GELU(),
                                torch::nn::Dropout(0.1), torch::nn::Linear(4 * width, width),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}))));
    }
    register_module("blocks", blocks);
  }

  torch::Tensor forward(torch::Tensor x) {
    for (const auto& child : *blocks) {
      torch::nn::Sequential block(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(child));
      if (checkpointed) {
        x = x + headroom::checkpoint(block, x);  // this is the line that changed ...
      } else {
        x = x + block->forward(x);  // ... and this is what it was
      }
    }
    return x;
  }

  torch::nn::ModuleList blocks;
  bool checkpointed = false;
};
TORCH_MODULE(Net);

int main() {
  headroom::MemoryMeter& meter = headroom::MemoryMeter::instance();
  torch::manual_seed(0);
  Net net(12, 128);
  const torch::Tensor x = torch::randn({256, 128});

  std::vector<torch::Tensor> gradients[2];
  std::int64_t peaks[2];
  for (const bool checkpointed : {false, true}) {
    net->checkpointed = checkpointed;
    net->zero_grad();
    torch::manual_seed(1);  // the same dropout in both runs
    const std::int64_t base = meter.live_bytes();
    meter.reset_peak();
    net->forward(x).pow(2).mean().backward();
    peaks[checkpointed] = meter.peak_bytes() - base;
    for (const torch::Tensor& parameter : net->parameters())
      gradients[checkpointed].push_back(parameter.grad().clone());
  }

  bool identical = true;
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    identical = identical && torch::equal(gradients[0][i], gradients[1][i]);
  std::printf("plain        %6.1f MB at the peak\n", static_cast<double>(peaks[0]) / 1e6);
  std::printf("checkpointed %6.1f MB at the peak; gradients are %s\n",
              static_cast<double>(peaks[1]) / 1e6, identical ? "bit-identical" : "DIFFERENT");
  return identical && peaks[1] < peaks[0] ? 0 : 1;
}
