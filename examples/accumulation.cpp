// Gradient accumulation in an ordinary LibTorch loop: one object, and the update of the large
// batch.

#include <headroom/data/dataset.h>
#include <headroom/execute/accumulator.h>
#include <headroom/optim/schedule.h>

#include <torch/torch.h>

#include <cstdio>
#include <vector>

namespace {

/// Points in the plane, in four classes by quadrant.
std::vector<headroom::MicroBatch> make_batches(std::int64_t num_batches, std::int64_t batch_size) {
  std::vector<headroom::MicroBatch> batches;
  for (std::int64_t i = 0; i < num_batches; ++i) {
    headroom::MicroBatch batch;
    batch.inputs = {torch::randn({batch_size, 2})};
    batch.targets = {(batch.inputs[0].select(1, 0) > 0).to(torch::kLong) * 2 +
                     (batch.inputs[0].select(1, 1) > 0).to(torch::kLong)};
    batch.num_samples = batch_size;
    batches.push_back(std::move(batch));
  }
  return batches;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const std::int64_t num_epochs = 8;
  const std::vector<headroom::MicroBatch> batches = make_batches(11, 64);
  torch::nn::Sequential model(torch::nn::Linear(2, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 4));

  torch::optim::AdamW optimizer(model->parameters(), 0.02);
  headroom::GradientAccumulator accumulator(
      optimizer, {{0, 6}, {4, 3}});  // six micro-batches per update, from epoch 4 on three
  headroom::LrScheduler scheduler(
      optimizer,
      headroom::LearningRateSchedule(headroom::ScheduleKind::kCosine, /*num_updates=*/68));
  for (std::int64_t epoch = 0; epoch < num_epochs; ++epoch) {
    accumulator.start_epoch(epoch);
    for (const headroom::MicroBatch& batch : batches) {
      for (const headroom::MicroBatch& micro :
           headroom::split(batch, /*max_micro_batch=*/24)) {  // 64 samples: 22, 21, 21
        auto loss =
            torch::nn::functional::cross_entropy(model->forward(micro.inputs[0]), micro.targets[0]);
        if (accumulator.backward(loss, micro.num_items)) scheduler.step();
      }
    }
    if (accumulator.flush())
      scheduler.step();  // the last window may be shorter: it counts with its true weight
  }

  const headroom::WindowReport& last = accumulator.last_window();
  std::printf(
      "%lld updates; loss %.4f and gradient norm %.4f of the last global batch, %lld samples in "
      "%lld micro-batches\n",
      static_cast<long long>(accumulator.num_updates()), last.loss, last.grad_norm,
      static_cast<long long>(last.items), static_cast<long long>(last.num_micro_batches));
  return last.loss < 0.3 && accumulator.num_updates() == 68 ? 0 : 1;
}
