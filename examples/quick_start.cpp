#include <headroom/headroom.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  headroom::MemoryMeter::instance();  // counts every tensor from here on
  torch::nn::Sequential network(torch::nn::Flatten(), torch::nn::Linear(784, 512),
                                torch::nn::ReLU(), torch::nn::Linear(512, 10));
  headroom::TrainingArguments arguments;
  arguments.global_batch_size = 256;  // samples per update; the planner splits it
  arguments.memory_budget_bytes =
      headroom::parse_bytes("8MiB");  // weights, gradients, AdamW's state and activations
  arguments.max_steps = 100;
  headroom::Trainer trainer(
      arguments, headroom::Chain::from_sequential(network.ptr(), headroom::summed_cross_entropy),
      headroom::open_idx_images("/usr/share/datasets/fashion-mnist", /*train=*/true));
  const headroom::TrainResults results = trainer.train();
  std::cout << "loss " << results.final_loss << ", peak "
            << headroom::format_bytes(results.peak_memory_bytes) << "\n";
}
