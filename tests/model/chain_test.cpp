#include <headroom/model/chain.h>

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include <headroom/model/zoo.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

namespace nn = torch::nn;

MicroBatch make_batch(std::int64_t size, std::int64_t width, std::int64_t classes) {
  return {
      {torch::randn({size, width})}, {torch::randint(classes, {size}, torch::kLong)}, size, size};
}

nn::Sequential make_network() {
  return nn::Sequential(nn::Linear(6, 5), nn::BatchNorm1d(5), nn::ReLU(), nn::Linear(5, 3));
}

TEST(ChainFromSequential, HasOneStagePerChildAndTheLossInTheLast) {
  seed_everything(1);
  nn::Sequential network = make_network();
  const Chain chain = Chain::from_sequential(network.ptr(), summed_cross_entropy);
  ASSERT_EQ(chain.size(), 4U);
  const MicroBatch micro = make_batch(8, 6, 3);
  std::vector<at::Tensor> values = micro.inputs;
  for (std::size_t i = 0; i < chain.size(); ++i) values = chain.stage(i).forward(values, micro, 0);
  ASSERT_EQ(values.size(), 1U);
  const at::Tensor expected =
      nn::functional::cross_entropy(network->forward(micro.inputs[0]), micro.targets[0]) * 8;
  EXPECT_NEAR(values[0].item<double>(), expected.item<double>(), 1e-4);
}

TEST(ChainFromSequential, AddsTheRightAnswersWhenItDoesNotTrain) {
  seed_everything(2);
  nn::Sequential network = make_network();
  const Chain chain = Chain::from_sequential(network.ptr(), summed_cross_entropy);
  chain.train(false);
  EXPECT_FALSE(network->is_training() && chain.stage(0).module()->is_training());
  const MicroBatch micro = make_batch(50, 6, 3);
  const std::vector<at::Tensor> outputs = Executor(chain).evaluate(micro);
  ASSERT_EQ(outputs.size(), 3U);
  network->eval();
  const at::Tensor classes = network->forward(micro.inputs[0]).argmax(1);
  EXPECT_EQ(outputs[1].item<std::int64_t>(),
            classes.eq(micro.targets[0]).sum().item<std::int64_t>());
  EXPECT_TRUE(torch::equal(outputs[2], classes));
  chain.train(true);
  EXPECT_TRUE(chain.stage(1).module()->is_training());
}

TEST(ChainFromSequential, AnEmptyOneIsRefused) {
  EXPECT_THROW(Chain::from_sequential(nn::Sequential().ptr(), summed_cross_entropy), ConfigError);
}

TEST(ChainFromSequential, GradientsAreThoseOfTheWholeNetwork) {
  seed_everything(3);
  nn::Sequential network = make_network();
  const MicroBatch micro = make_batch(8, 6, 3);
  const Chain chain = Chain::from_sequential(network.ptr(), summed_cross_entropy);
  Executor executor(chain);
  const MicroResult result = executor.accumulate(micro, keep_everything(chain.size()), 1.0 / 8);
  std::vector<at::Tensor> ours;
  for (at::Tensor& parameter : network->parameters()) {
    ours.push_back(parameter.grad().clone());
    parameter.mutable_grad() = at::Tensor();
  }
  const at::Tensor loss =
      nn::functional::cross_entropy(network->forward(micro.inputs[0]), micro.targets[0]);
  loss.backward();
  EXPECT_NEAR(result.loss_sum / 8, loss.item<double>(), 1e-6);
  EXPECT_EQ(result.num_forwards, 4);
  EXPECT_EQ(result.num_recomputes, 0);
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(torch::allclose(ours[i], network->parameters()[i].grad(), 1e-5, 1e-7)) << i;
}

TEST(Chain, NamesParametersAndBuffersByStageAndCountsThem) {
  const Chain chain = Chain::from_sequential(make_network().ptr(), summed_cross_entropy);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : chain.named_parameters()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias", "3.weight",
                                             "3.bias"}));
  EXPECT_EQ(chain.num_parameters(), 6 * 5 + 5 + 5 + 5 + 5 * 3 + 3);
  EXPECT_EQ(chain.named_buffers().size(), 3U) << "running mean, running variance, batches tracked";
}

Chain::Forward keep_as_is() {
  return [](const std::vector<at::Tensor>& inputs, const MicroBatch&) { return inputs; };
}

TEST(Chain, TiedParametersAreListedOnceAndFrozenOnesNotAtAll) {
  nn::Linear shared(4, 4), frozen(4, 4);
  for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  Chain chain;
  chain.add("first", shared.ptr(), keep_as_is())
      .add("middle", frozen.ptr(), keep_as_is())
      .add("last", shared.ptr(), keep_as_is());
  EXPECT_EQ(chain.named_parameters().size(), 2U);
  EXPECT_EQ(chain.named_parameters()[0].first, "first.weight");
  EXPECT_EQ(chain.parameters().size(), 2U);
}

TEST(Chain, TwoStagesOfOneNameAreRefused) {
  Chain chain;
  chain.add("stage", nullptr, keep_as_is());
  EXPECT_THROW(chain.add("stage", nullptr, keep_as_is()), ConfigError);
}

}  // namespace
}  // namespace headroom
