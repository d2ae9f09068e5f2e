// A model of one's own, trained inside a budget: a chain of named stages over any
// torch::nn::Module. The skip connection from the first stage to the last is one more tensor that
// the stages between carry along.
#include <headroom/headroom.h>

#include <torch/torch.h>

#include <cstdio>

int main() {
  namespace nn = torch::nn;
  nn::Linear in(784, 256), out(256, 10);

  headroom::Chain chain;
  chain.add("in", in.ptr(), [in](const auto& x, const auto&) mutable {
    const torch::Tensor hidden = torch::relu(in(x[0].flatten(1)));
    return std::vector<torch::Tensor>{hidden, hidden};
  });
  for (int i = 0; i < 4; ++i) {
    nn::Linear layer(256, 256);
    chain.add("layer" + std::to_string(i), layer.ptr(),
              [layer](const auto& x, const auto&) mutable {
                return std::vector<torch::Tensor>{torch::relu(layer(x[0])), x[1]};
              });
  }
  chain.add("out", out.ptr(), [out](const auto& x, const headroom::MicroBatch& micro) mutable {
    return std::vector<torch::Tensor>{headroom::summed_cross_entropy({out(x[0] + x[1])}, micro)};
  });

  headroom::TrainingArguments arguments;
  arguments.global_batch_size = 64;
  arguments.memory_budget_bytes = headroom::parse_bytes("8MiB");
  arguments.max_steps = 20;
  arguments.learning_rate = 1e-3;
  arguments.disable_tqdm = true;
  arguments.output_dir = "own_model_output";

  std::shared_ptr<const headroom::Dataset> data =
      headroom::make_synthetic_images(256, 1, 28, 28, 10, /*seed=*/1);
  const headroom::TrainResults results = headroom::Trainer(arguments, chain, data).train();
  std::printf("loss %.4f, peak %s of %s\n", results.final_loss,
              headroom::format_bytes(results.peak_memory_bytes).c_str(),
              headroom::format_bytes(results.memory_budget_bytes).c_str());
  return results.peak_memory_bytes <= results.memory_budget_bytes ? 0 : 1;
}
