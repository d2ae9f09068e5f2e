// Training on as many ranks as the environment says, one without torchrun:
//   torchrun --no-python --nproc_per_node 2 example_data_parallel
#include <headroom/headroom.h>
#include <torch/torch.h>

#include <chrono>
#include <iostream>

int main() {
  headroom::MemoryMeter::instance();  // counts every tensor from here on
  const headroom::RankEnvironment ranks = headroom::RankEnvironment::read();
  const std::shared_ptr<headroom::Communicator> comm =
      headroom::join_ranks(ranks, std::chrono::seconds(1800));
  headroom::configure_threads(
      0, static_cast<int>(ranks.local_size));  // ranks of one machine share its cores
  torch::nn::Sequential network(torch::nn::Flatten(), torch::nn::Linear(784, 128),
                                torch::nn::ReLU(), torch::nn::Linear(128, 10));
  headroom::TrainingArguments arguments;
  arguments.global_batch_size = 256;  // over all ranks: each trains its share
  arguments.max_steps = 50;
  arguments.output_dir = "data_parallel";  // rank 0 alone writes there
  headroom::Trainer trainer(
      arguments, headroom::Chain::from_sequential(network.ptr(), headroom::summed_cross_entropy),
      headroom::open_idx_images("/usr/share/datasets/fashion-mnist", /*train=*/true),
      headroom::open_idx_images("/usr/share/datasets/fashion-mnist", /*train=*/false), comm);
  const headroom::TrainResults results = trainer.train();
  if (comm->is_first())
    std::cout << comm->size() << " ranks, accuracy " << *results.eval->accuracy << "\n";
}
