// What a stage costs in bytes comes out the same whether it is counted on shapes or measured on
// memory.
#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>
#include "execute/profile.h"
#include "memory/shape_meter.h"

#include "support/zoo_data.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

namespace headroom {
namespace {

MicroBatch load(const ModelInput& input, std::int64_t num_samples) {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(num_samples));
  std::iota(indices.begin(), indices.end(), 0);
  return testing::synthetic_data(input, num_samples, 1)->load(indices);
}

void expect_close(std::int64_t counted, std::int64_t measured, const char* what) {
  EXPECT_GE(counted, measured) << what;
  EXPECT_LE(counted, measured + 64) << what << ": exact but for scalars";
}

void expect_same_bytes(const ChainCosts& counted, const ChainCosts& measured) {
  ASSERT_EQ(counted.stages.size(), measured.stages.size());
  for (std::size_t i = 0; i < counted.stages.size(); ++i) {
    const StageCosts &a = counted.stages[i], &b = measured.stages[i];
    SCOPED_TRACE(a.name);
    EXPECT_EQ(a.output_bytes, b.output_bytes);
    EXPECT_EQ(a.grad_bytes, b.grad_bytes);
    EXPECT_EQ(a.param_grad_bytes, b.param_grad_bytes);
    expect_close(a.forward_transient_bytes, b.forward_transient_bytes, "sweep");
    ASSERT_EQ(a.options.size(), b.options.size());
    for (std::size_t k = 0; k < a.options.size(); ++k) {
      SCOPED_TRACE("option " + std::to_string(k));
      EXPECT_EQ(a.options[k].kept_bytes, b.options[k].kept_bytes);
      expect_close(a.options[k].forward_transient_bytes, b.options[k].forward_transient_bytes,
                   "forward");
      expect_close(a.options[k].backward_transient_bytes, b.options[k].backward_transient_bytes,
                   "backward");
    }
  }
}

struct CountedModel {
  std::string name;
  std::string config;
};

class CountedBytes : public ::testing::TestWithParam<CountedModel> {};

TEST_P(CountedBytes, EqualMeasuredBytesForEveryStageAndOption) {
  MemoryMeter::instance();
  seed_everything(1);
  const ZooModel model = make_model(GetParam().name, GetParam().config);
  ASSERT_TRUE(model.chain.runs_without_memory());
  std::vector<at::Tensor> tensors = model.chain.parameters();
  for (const auto& [name, buffer] : model.chain.named_buffers()) tensors.push_back(buffer);
  for (const auto half :
       {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
    for (const std::int64_t num_samples : {1, 2, 5, 8, 24}) {
      SCOPED_TRACE(GetParam().name + " of " + std::to_string(num_samples) +
                   (half ? " in bf16" : ""));
      const MicroBatch micro = load(model.input, num_samples);
      const auto measured = profile_chain(model.chain, micro, half);
      ASSERT_TRUE(measured);
      MicroBatch shapes{{}, {}, micro.num_samples, micro.num_items};
      for (const at::Tensor& input : micro.inputs) shapes.inputs.push_back(shape_of(input));
      for (const at::Tensor& target : micro.targets) shapes.targets.push_back(shape_of(target));
      const MetaSwapScope without(tensors);
      const std::int64_t live = MemoryMeter::instance().live_bytes();
      const auto counted = profile_chain(model.chain, shapes, half);
      ASSERT_TRUE(counted);
      EXPECT_EQ(MemoryMeter::instance().live_bytes(), live);
      EXPECT_EQ(counted->input_bytes, measured->input_bytes);
      expect_same_bytes(counted->grads_unallocated, measured->grads_unallocated);
      expect_same_bytes(counted->grads_preallocated, measured->grads_preallocated);
      EXPECT_TRUE(agree(*measured, *counted));
    }
  }
}

TEST(CountChain, RefusesAStageThatNeedsMemoryAndLeavesTheModelAsItWas) {
  torch::nn::Sequential network(torch::nn::Linear(4, 4), torch::nn::Linear(4, 3));
  const at::Tensor captured = torch::ones({3});
  const Chain::Loss plain = [](const std::vector<at::Tensor>& outputs, const MicroBatch&) {
    return outputs[0].sum();
  };
  const Chain::Loss reads_a_value = [](const std::vector<at::Tensor>& outputs, const MicroBatch&) {
    return outputs[0].sum() * outputs[0].sum().item<double>();
  };
  const Chain::Loss uses_another_tensor = [&](const std::vector<at::Tensor>& outputs,
                                              const MicroBatch&) {
    return (outputs[0] * captured).sum();
  };
  const MicroBatch micro{{torch::ones({2, 4})}, {}, 2, 2};
  const at::Tensor before = network->parameters()[0].detach().clone();
  EXPECT_FALSE(count_chain(Chain::from_sequential(network.ptr(), plain), micro, 5))
      << "a stage is trusted only when it says so";
  EXPECT_TRUE(count_chain(Chain::from_sequential(network.ptr(), plain, true), micro, 5));
  EXPECT_FALSE(count_chain(Chain::from_sequential(network.ptr(), reads_a_value, true), micro, 5));
  EXPECT_FALSE(
      count_chain(Chain::from_sequential(network.ptr(), uses_another_tensor, true), micro, 5));
  EXPECT_TRUE(torch::equal(network->parameters()[0], before));
  EXPECT_FALSE(network->parameters()[0].grad().defined());
}

INSTANTIATE_TEST_SUITE_P(
    Zoo, CountedBytes,
    ::testing::Values(
        CountedModel{"mlp", "hidden=64,layers=3"},
        CountedModel{"nin", "width=8,rows=14,columns=14"},
        CountedModel{"resnet", "blocks=2,width=8,rows=12,columns=12"},
        CountedModel{"resnet", "blocks=2,width=8,rows=12,columns=12,norm=0,channels=3"},
        CountedModel{"gpt", "n_layer=2,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1"},
        CountedModel{"gpt", "n_layer=2,n_head=4,n_embd=64,block_size=200,vocab_size=300,dropout=0"},
        CountedModel{
            "llama",
            "num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,hidden_size=64,"
            "intermediate_size=100,max_position_embeddings=200,vocab_size=300,"
            "attention_bias=true"},
        CountedModel{
            "vit",
            "num_hidden_layers=2,num_attention_heads=2,hidden_size=32,intermediate_size=64,"
            "dropout=0.1"},
        CountedModel{
            "bert",
            "num_hidden_layers=2,num_attention_heads=4,hidden_size=64,intermediate_size=128,"
            "max_position_embeddings="
            "200,length=180,vocab_size=300,dropout=0.1"},
        CountedModel{
            "clip",
            "vision_num_hidden_layers=1,text_num_hidden_layers=1,vision_hidden_size=32,text_"
            "hidden_size=32,vocab_size="
            "60,text_dropout=0.1"}),
    [](const auto& which) { return which.param.name + std::to_string(which.index); });

}  // namespace
}  // namespace headroom
