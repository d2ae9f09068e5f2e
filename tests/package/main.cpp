// A program that knows nothing but LibTorch, the installed package and its one header: uses each
// name that is promised to users.
#include <headroom/headroom.h>

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

namespace {

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

void use_checkpoint() {
  const auto fn = [](const torch::Tensor& x, const torch::Tensor& mask) {
    return (x * mask).tanh();
  };
  const torch::Tensor x = torch::ones({2, 3}, torch::requires_grad());
  headroom::checkpoint(fn, x, torch::ones({2, 3})).sum().backward();
  expect(x.grad().defined(), "checkpoint");
  torch::nn::Sequential sequential(torch::nn::Linear(3, 3), torch::nn::Tanh(),
                                   torch::nn::Linear(3, 3), torch::nn::Tanh());
  const torch::Tensor y = headroom::checkpoint_sequential(sequential, 4, x.detach());
  expect(torch::equal(y, sequential->forward(x.detach())), "checkpoint_sequential");
}

void use_accumulator() {
  torch::nn::Linear model(3, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  headroom::GradientAccumulator accumulator(optimizer, 2);
  const auto loss = [&] { return model->forward(torch::ones({4, 3})).sum(); };
  expect(!accumulator.backward(loss(), 4), "GradientAccumulator: the first of two");
  expect(accumulator.backward(loss(), 4), "GradientAccumulator: the second of two");
  headroom::GradientAccumulator by_epoch(optimizer, {{0, 8}, {4, 2}});
  by_epoch.backward(loss(), 4);
  by_epoch.flush();
}

void use_contrastive() {
  torch::nn::Linear model(3, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  headroom::ContrastiveAccumulator accumulator(
      optimizer, *model,
      [&](const headroom::MicroBatch& micro) {
        return std::vector<torch::Tensor>{model->forward(micro.inputs[0])};
      },
      [](const std::vector<torch::Tensor>& e) { return torch::mm(e[0], e[0].t()).mean(); });
  headroom::MicroBatch batch;
  batch.inputs = {torch::randn({6, 3})};
  batch.num_samples = 6;
  expect(accumulator.update(headroom::split(batch, 2)).updated, "ContrastiveAccumulator");
}

void use_safetensors() {
  const torch::Tensor weight = torch::randn({2, 3});
  headroom::save_safetensors("package_test.safetensors", {{"weight", weight}});
  expect(torch::equal(headroom::load_safetensors("package_test.safetensors").at("weight"), weight),
         "load_safetensors and save_safetensors");
}

void use_planner() {
  headroom::PlanRequest request;
  request.budget_bytes = 1000;
  request.num_samples = 4;
  request.choices.emplace_back();
  request.costs = [](std::int64_t micro_batch_size, const headroom::StaticChoice& /*choice*/) {
    headroom::MicroBatchCosts costs;
    headroom::StageCosts stage;
    stage.options.emplace_back();
    stage.options.front().kept_bytes = micro_batch_size;
    costs.chain.stages.push_back(stage);
    return costs;
  };
  expect(headroom::make_plan(request).peak_bytes <= 1000, "make_plan");
}

headroom::TrainResults use_trainer() {
  const headroom::ZooModel model =
      headroom::make_model("mlp", "hidden=16,layers=1,rows=4,columns=4");
  const headroom::Chain& chain = model.chain;
  expect(chain.size() == 2, "Chain");
  headroom::TrainingArguments arguments;
  arguments.output_dir = "package_test_output";
  arguments.max_steps = 2;
  arguments.disable_tqdm = true;
  const std::shared_ptr<const headroom::Dataset> data =
      headroom::make_synthetic_images(32, 1, 4, 4, 10, 1);
  return headroom::Trainer(arguments, chain, data).train();
}

}  // namespace

int main() {
  use_checkpoint();
  use_accumulator();
  use_contrastive();
  use_safetensors();
  use_planner();
  const headroom::TrainResults results = use_trainer();
  expect(results.global_step == 2, "Trainer");
  expect(headroom::MemoryMeter::instance().peak_bytes() > 0, "MemoryMeter");
  expect(headroom::parse_bytes("1KiB") == 1024, "parse_bytes");
  std::printf("headroom %s: %lld updates, loss %.4f\n", headroom::kVersion,
              static_cast<long long>(results.global_step), results.final_loss);
  return 0;
}
