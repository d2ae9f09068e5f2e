#include <headroom/execute/executor.h>

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/execute/autocast.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>
#include <headroom/plan/schedule.h>

#include "support/zoo_data.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

struct ModelOutcome {
  double loss = 0.0;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> buffers;
  MicroResult result;
};

MicroBatch some_samples(const ModelInput& input) {
  return testing::synthetic_data(input, 8, 3)->load({0, 1, 2, 3});
}

ModelOutcome run_model(const std::string& name, const std::string& config,
                       const std::vector<Operation>* operations, std::optional<at::ScalarType> half,
                       bool check_values = false,
                       std::optional<at::ScalarType> compute = std::nullopt) {
  seed_everything(5);
  const ZooModel model = make_model(name, config);
  ExecutorOptions options;
  options.keep_in_half = half;
  options.compute_in_half = compute;
  options.check_recomputed_values = check_values;
  Executor executor(model.chain, options);
  const MicroBatch micro = some_samples(model.input);
  ModelOutcome run;
  run.result = executor.accumulate(
      micro, operations ? *operations : keep_everything(model.chain.size()), 0.25);
  run.loss = run.result.loss_sum;
  for (const auto& [parameter_name, parameter] : model.chain.named_parameters()) {
    EXPECT_TRUE(parameter.grad().defined()) << parameter_name << " has no gradient";
    run.gradients.push_back(parameter.grad().clone());
  }
  for (const auto& [buffer_name, buffer] : model.chain.named_buffers())
    run.buffers.push_back(buffer.clone());
  return run;
}

std::vector<Operation> policy(const std::string& text, std::size_t num_stages) {
  ChainCosts costs;
  costs.stages.resize(num_stages);
  for (StageCosts& stage : costs.stages) stage.options.resize(1);
  return schedule_of_policy(costs, parse_policy(text)).operations;
}

void expect_identical(const ModelOutcome& a, const ModelOutcome& b) {
  EXPECT_EQ(a.loss, b.loss);
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (std::size_t i = 0; i < a.gradients.size(); ++i)
    EXPECT_TRUE(torch::equal(a.gradients[i], b.gradients[i])) << "gradient " << i;
  for (std::size_t i = 0; i < a.buffers.size(); ++i)
    EXPECT_TRUE(torch::equal(a.buffers[i], b.buffers[i])) << "buffer " << i;
}

struct ModelCase {
  const char* name;
  const char* config;
  std::size_t num_stages;
};

const ModelCase kModels[] = {
    {"mlp", "hidden=32,layers=4", 5},
    {"nin", "width=4,rows=14,columns=14", 4},
    {"resnet", "blocks=6,width=4,rows=10,columns=10", 8},
    {"gpt", "n_layer=3,n_head=2,n_embd=32,block_size=16,vocab_size=50,dropout=0.1", 5},
    {"llama",
     "num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,hidden_size=32,intermediate_"
     "size=48,max_position_embeddings=16,vocab_size=50,attention_bias=true,tie_word_embeddings="
     "false",
     5},
    {"vit",
     "num_hidden_layers=3,num_attention_heads=2,hidden_size=32,intermediate_size=48,image_size=16,"
     "dropout=0.1",
     5},
    {"bert",
     "num_hidden_layers=3,num_attention_heads=2,hidden_size=32,intermediate_size=48,max_position_"
     "embeddings=20,"
     "length=16,vocab_size=50,mlm_probability=0.3,dropout=0.1",
     5},
    {"clip",
     "vision_num_hidden_layers=2,vision_num_attention_heads=2,vision_hidden_size=32,vision_"
     "intermediate_size=64,"
     "text_num_hidden_layers=2,text_num_attention_heads=2,text_hidden_size=32,text_intermediate_"
     "size=64,image_size=16,"
     "length=12,vocab_size=40,projection_dim=16,vision_dropout=0.1",
     9}};

TEST(Executor, EveryPolicyGivesBitIdenticalLossGradientsAndBuffers) {
  for (const ModelCase& model : kModels) {
    const ModelOutcome plain = run_model(model.name, model.config, nullptr, std::nullopt);
    EXPECT_EQ(plain.result.num_recomputes, 0);
    for (const char* text : {"every", "sqrt", "log", "segments=2", "revolve=2"}) {
      SCOPED_TRACE(std::string(model.name) + " " + text);
      const std::vector<Operation> operations = policy(text, model.num_stages);
      const ModelOutcome run =
          run_model(model.name, model.config, &operations, std::nullopt, /*check_values=*/true);
      EXPECT_GT(run.result.num_recomputes, 0);
      expect_identical(run, plain);
    }
  }
}

TEST(Executor, HalfPrecisionKeepingAgreesBetweenPlansAndIsCloseToFloat) {
  for (const ModelCase& model : kModels) {
    const ModelOutcome exact = run_model(model.name, model.config, nullptr, std::nullopt);
    const ModelOutcome plain = run_model(model.name, model.config, nullptr, at::kBFloat16);
    EXPECT_NEAR(plain.loss, exact.loss, 0.05 * exact.loss) << model.name;
    // BatchNorm over four small images divides by almost nothing and makes much of a rounding.
    const bool has_batch_norm = !exact.buffers.empty();
    for (std::size_t i = 0; i < exact.gradients.size() && !has_batch_norm; ++i) {
      const double error = (plain.gradients[i] - exact.gradients[i]).norm().item<double>();
      EXPECT_LE(error, 0.05 * exact.gradients[i].norm().item<double>() + 1e-6)
          << model.name << " gradient " << i;
    }
    for (const char* text : {"every", "sqrt"}) {
      SCOPED_TRACE(std::string(model.name) + " " + text);
      const std::vector<Operation> operations = policy(text, model.num_stages);
      expect_identical(run_model(model.name, model.config, &operations, at::kBFloat16), plain);
    }
  }
}

// Bytes of activations when forward is done, by the first option that half precision uses.
std::int64_t kept_bytes(const ZooModel& model, const MicroBatch& micro,
                        std::optional<at::ScalarType> half) {
  std::vector<Operation> operations = keep_everything(model.chain.size());
  for (Operation& operation : operations) {
    const bool keeps = operation.kind == OperationKind::kForwardKeep;
    if (keeps && !half)
      operation.option = model.chain.stage(static_cast<std::size_t>(operation.stage)).half_option();
  }
  const auto live = [] {
    return MemoryMeter::instance()
        .use()
        .live_by_owner[static_cast<std::size_t>(Owner::kActivations)];
  };
  const std::int64_t before = live();
  std::int64_t bytes = 0;
  ExecutorOptions options;
  options.keep_in_half = half;
  options.on_operation = [&](std::size_t operation) {
    if (operation + 1 == model.chain.size()) bytes = live() - before;
  };
  Executor(model.chain, options).accumulate(micro, operations, 1.0);
  return bytes;
}

TEST(Executor, HalfPrecisionKeepsHalfTheBytes) {
  const ZooModel gpt =
      make_model("gpt", "n_layer=4,n_head=2,n_embd=64,block_size=32,vocab_size=50");
  // A ReLU keeps what the next stage reads: that is stored once.
  const ZooModel mlp = make_model("mlp", "hidden=64,layers=6,rows=8,columns=8");
  std::vector<std::int64_t> indices(128);
  for (std::size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<std::int64_t>(i);
  const MicroBatch images = make_synthetic_images(128, 1, 8, 8, 10, 3)->load(indices);
  for (const at::ScalarType half : {at::kBFloat16, at::kHalf}) {
    const MicroBatch tokens = some_samples(gpt.input);
    EXPECT_LE(static_cast<double>(kept_bytes(gpt, tokens, half)),
              0.53 * static_cast<double>(kept_bytes(gpt, tokens, std::nullopt)));
    EXPECT_LE(static_cast<double>(kept_bytes(mlp, images, half)),
              0.53 * static_cast<double>(kept_bytes(mlp, images, std::nullopt)));
  }
}

void expect_options_to_round_alike(const ModelCase& model, at::ScalarType half) {
  const ModelOutcome plain = run_model(model.name, model.config, nullptr, half);
  for (const int option : {1, 2}) {
    for (const char* text : {"none", "sqrt"}) {
      std::vector<Operation> operations = policy(text, model.num_stages);
      for (Operation& operation : operations) {
        const bool is_block =
            operation.stage > 0 && operation.stage + 1 < static_cast<int>(model.num_stages);
        if (operation.kind == OperationKind::kForwardKeep && is_block) operation.option = option;
      }
      SCOPED_TRACE(std::string(model.name) + " option " + std::to_string(option) + " " + text);
      expect_identical(run_model(model.name, model.config, &operations, half), plain);
    }
  }
}

TEST(Executor, EveryOptionOfABlockRoundsTheSameValues) {
  for (const std::size_t transformer : {3U, 4U, 5U}) {
    for (const at::ScalarType half : {at::kBFloat16, at::kHalf})
      expect_options_to_round_alike(kModels[transformer], half);
  }
}

TEST(Executor, EveryPolicyGivesTheSameBitsUnderAutocast) {
  for (const ModelCase& model : kModels) {
    const ModelOutcome exact = run_model(model.name, model.config, nullptr, std::nullopt);
    const ModelOutcome plain =
        run_model(model.name, model.config, nullptr, std::nullopt, false, at::kBFloat16);
    EXPECT_NE(plain.loss, exact.loss) << model.name << ": nothing was computed in bf16";
    EXPECT_NEAR(plain.loss, exact.loss, 0.05 * exact.loss) << model.name;
    for (const at::Tensor& gradient : plain.gradients)
      EXPECT_EQ(gradient.scalar_type(), at::kFloat);
    for (const char* text : {"every", "sqrt", "log", "revolve=2"}) {
      SCOPED_TRACE(std::string(model.name) + " " + text);
      const std::vector<Operation> operations = policy(text, model.num_stages);
      expect_identical(run_model(model.name, model.config, &operations, std::nullopt,
                                 /*check_values=*/true, at::kBFloat16),
                       plain);
      // A scope of the user's own keeps cast weights; those that a sweep without gradients made
      // must not be found by the recompute.
      const Autocast outer(at::kCPU, at::kBFloat16);
      expect_identical(
          run_model(model.name, model.config, &operations, std::nullopt, false, at::kBFloat16),
          plain);
    }
  }
}

TEST(Executor, KeepsOrComputesInHalfPrecisionButNotBoth) {
  ExecutorOptions options;
  options.keep_in_half = options.compute_in_half = at::kBFloat16;
  EXPECT_THROW(Executor(make_model("mlp", "hidden=8").chain, options), ConfigError);
}

TEST(Executor, EqualsOneGraphOverTheWholeModel) {
  seed_everything(5);
  const ZooModel model =
      make_model("gpt", "n_layer=2,n_head=2,n_embd=32,block_size=16,vocab_size=50,dropout=0.1");
  const MicroBatch micro = some_samples(model.input);
  const RandomState random = RandomState::capture();
  std::vector<at::Tensor> values = micro.inputs;
  for (std::size_t i = 0; i < model.chain.size(); ++i)
    values = model.chain.stage(i).forward(values, micro, 0);
  values[0].backward();
  std::vector<at::Tensor> expected;
  for (const at::Tensor& parameter : model.chain.parameters()) {
    expected.push_back(parameter.grad().clone());
    parameter.mutable_grad() = at::Tensor();
  }
  random.restore();
  Executor executor(model.chain);
  const MicroResult result = executor.accumulate(micro, keep_everything(model.chain.size()), 1.0);
  EXPECT_EQ(result.loss_sum, values[0].item<double>());
  const std::vector<at::Tensor> parameters = model.chain.parameters();
  // The gradient of the tied weight is a sum over two stages, in another order.
  EXPECT_TRUE(torch::allclose(parameters[0].grad(), expected[0], 1e-5, 1e-6));
  for (std::size_t i = 1; i < parameters.size(); ++i)
    EXPECT_TRUE(torch::equal(parameters[i].grad(), expected[i])) << "gradient " << i;
}

TEST(Executor, LeavesNothingBehind) {
  seed_everything(5);
  const ZooModel model =
      make_model("gpt", "n_layer=3,n_head=2,n_embd=32,block_size=16,vocab_size=50");
  const MicroBatch micro = some_samples(model.input);
  Executor executor(model.chain);
  const std::vector<Operation> operations = policy("sqrt", model.chain.size());
  executor.accumulate(micro, operations, 1.0);
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  for (int i = 0; i < 50; ++i) executor.accumulate(micro, operations, 1.0);
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), live);
}

// Its forward counts its calls, which is no input, parameter or random number.
class Forgetful final : public Stage {
 public:
  Forgetful() : Stage("forgetful") {}
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs, const MicroBatch&,
                                  int) override {
    return {inputs[0] * ++calls_};
  }
  std::shared_ptr<torch::nn::Module> module() const override { return nullptr; }

 private:
  int calls_ = 0;
};

TEST(Executor, RecomputeCheckNamesTheStageThatDiffers) {
  torch::nn::Linear in(4, 4), out(4, 2);
  Chain chain;
  chain.add("in", in.ptr(),
            [in](const auto& x, const auto&) mutable { return std::vector<at::Tensor>{in(x[0])}; });
  chain.add(std::make_shared<Forgetful>());
  chain.add("out", out.ptr(), [out](const auto& x, const MicroBatch& micro) mutable {
    return std::vector<at::Tensor>{summed_cross_entropy({out(x[0])}, micro)};
  });
  ExecutorOptions options;
  options.check_recomputed_values = true;
  Executor executor(chain, options);
  const MicroBatch micro{{torch::randn({3, 4})}, {torch::tensor({0, 1, 0})}, 3, 3};
  try {
    executor.accumulate(micro, policy("every", 3), 1.0);
    FAIL() << "the difference was not seen";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("forgetful"), std::string::npos) << error.what();
  }
}

TEST(Executor, AParameterChangedBeforeItsRecomputeIsAnError) {
  torch::nn::Linear in(4, 4), out(4, 2);
  Chain chain;
  chain.add("in", in.ptr(),
            [in](const auto& x, const auto&) mutable { return std::vector<at::Tensor>{in(x[0])}; });
  chain.add("out", out.ptr(), [in, out](const auto& x, const MicroBatch& micro) mutable {
    const torch::NoGradGuard no_grad_for_the_change;
    in->weight.add_(1.0);
    const torch::AutoGradMode with_grad(true);
    return std::vector<at::Tensor>{summed_cross_entropy({out(x[0])}, micro)};
  });
  Executor executor(chain);
  const MicroBatch micro{{torch::randn({3, 4})}, {torch::tensor({0, 1, 0})}, 3, 3};
  try {
    executor.accumulate(micro, policy("every", 2), 1.0);
    FAIL() << "the change was not seen";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("weight"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace headroom
