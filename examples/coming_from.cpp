// The C++ sides of docs/coming_from.md, each compiled and run.
#include <headroom/headroom.h>

#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

namespace F = torch::nn::functional;

namespace {

std::vector<headroom::MicroBatch> make_loader() {
  std::vector<headroom::MicroBatch> loader;
  for (int i = 0; i < 10; ++i) {
    headroom::MicroBatch micro;
    micro.inputs = {torch::randn({8, 16})};
    micro.targets = {torch::randint(4, {8})};
    micro.num_samples = micro.num_items = 8;
    loader.push_back(std::move(micro));
  }
  return loader;
}

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 4));
}

std::int64_t loop_with_accumulation(const std::vector<headroom::MicroBatch>& loader) {
  torch::nn::Sequential model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  headroom::LrScheduler scheduler(
      optimizer, headroom::LearningRateSchedule(headroom::ScheduleKind::kLinear, 3));
  headroom::AccumulatorOptions options;
  options.max_grad_norm = 1.0;
  headroom::GradientAccumulator accumulator(optimizer, 4, options);
  for (const headroom::MicroBatch& micro : loader) {
    const auto loss = F::cross_entropy(model->forward(micro.inputs[0]), micro.targets[0]);
    if (accumulator.backward(loss, micro.num_items)) scheduler.step();
  }
  if (accumulator.flush()) scheduler.step();
  return accumulator.num_updates();
}

std::int64_t accumulation_by_epoch(const std::vector<headroom::MicroBatch>& loader) {
  torch::nn::Sequential model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  headroom::GradientAccumulator accumulator(optimizer, {{0, 8}, {4, 2}});
  for (std::int64_t epoch = 0; epoch < 5; ++epoch) {
    accumulator.start_epoch(epoch);
    for (const headroom::MicroBatch& micro : loader) {
      const auto loss = F::cross_entropy(model->forward(micro.inputs[0]), micro.targets[0]);
      accumulator.backward(loss, micro.num_items);
    }
    accumulator.flush();
  }
  return accumulator.num_updates();
}

bool checkpointing(const torch::Tensor& x) {
  torch::nn::Sequential block = make_model(), sequential = make_model();
  auto y = headroom::checkpoint(block, x);
  auto z = headroom::checkpoint_sequential(sequential, 2, x);
  (y.sum() + z.sum()).backward();
  return block->parameters()[0].grad().defined() && sequential->parameters()[0].grad().defined();
}

std::int64_t train_in_a_budget(const std::string& output_dir) {
  headroom::TrainingArguments arguments;
  arguments.output_dir = output_dir;
  arguments.per_device_train_batch_size = 16;
  arguments.gradient_accumulation_steps = "4";
  arguments.learning_rate = 1e-3;
  arguments.max_steps = 3;
  arguments.memory_budget_bytes = headroom::parse_bytes("16MiB");  // instead of trial and error
  torch::nn::Sequential model(torch::nn::Flatten(), torch::nn::Linear(16, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 4));
  headroom::Trainer trainer(
      arguments, headroom::Chain::from_sequential(model.ptr(), headroom::summed_cross_entropy),
      headroom::make_synthetic_images(256, 1, 4, 4, 4, /*seed=*/1));
  return trainer.train().global_step;
}

std::int64_t contrastive(const std::vector<headroom::MicroBatch>& loader) {
  torch::nn::Sequential model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), 1e-3);
  headroom::ContrastiveAccumulator accumulator(
      optimizer, *model,
      [&](const headroom::MicroBatch& micro) {
        return std::vector<torch::Tensor>{model->forward(micro.inputs[0])};
      },
      [](const std::vector<torch::Tensor>& embeddings) {
        const auto scores = torch::mm(embeddings[0], embeddings[0].t());
        return F::cross_entropy(scores, torch::arange(scores.size(0)));
      });
  accumulator.update(loader);  // one update: every sample is compared with all others
  return accumulator.num_updates();
}

}  // namespace

int main() {
  headroom::MemoryMeter::instance();
  torch::manual_seed(0);
  const std::vector<headroom::MicroBatch> loader = make_loader();
  const bool right = loop_with_accumulation(loader) == 3 && accumulation_by_epoch(loader) == 13 &&
                     checkpointing(torch::randn({8, 16})) &&
                     train_in_a_budget("coming_from_output") == 3 && contrastive(loader) == 1;
  std::printf("%s\n", right ? "as documented" : "NOT as documented");
  return right ? 0 : 1;
}
