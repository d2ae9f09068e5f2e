// A TorchScript model as a chain gives what the model gives, bit by bit.
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/autocast.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/chain_solver.h>
#include "execute/profile.h"
#include "model/script_program.h"

#include "model/script_models.h"

#include <torch/script.h>

#include <algorithm>
#include <memory>
#include <set>

namespace headroom {
namespace {

using testing::samples_for;
using testing::ScriptModels;
using testing::weigh_everything;

class ScriptChain : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { models_ = std::make_unique<ScriptModels>(); }
  static void TearDownTestSuite() { models_.reset(); }

  void SetUp() override { seed_everything(5); }

  static std::unique_ptr<ScriptModels> models_;
};

std::unique_ptr<ScriptModels> ScriptChain::models_;

std::vector<const script::Cut*> every_cut(const script::CutGraph& graph,
                                          const script::Signature& /*signature*/) {
  std::vector<const script::Cut*> cuts;
  for (const script::Cut& cut : graph.cuts) cuts.push_back(&cut);
  return cuts;
}

TEST_F(ScriptChain, IsTheWholeModelAtEveryLegalCut) {
  for (const char* name : {"unet", "resnet", "t5", "control", "power", "lstm", "custom", "small",
                           "taps", "resnet_traced"}) {
    SCOPED_TRACE(name);
    const MicroBatch micro = samples_for(name, 4);
    const Chain chain = script::cut_module(torch::jit::load(models_->path(name)), weigh_everything,
                                           false, micro, every_cut);
    EXPECT_GT(chain.size(), 2U);
    EXPECT_NO_THROW(check_whole_model(chain, micro));
  }
}

TEST_F(ScriptChain, IsTheWholeModelAtItsOwnCutsAndOtherBatchSizes) {
  for (const char* name : {"unet", "resnet", "t5", "control", "power", "lstm", "custom"}) {
    SCOPED_TRACE(name);
    const Chain chain =
        Chain::from_script(models_->path(name), weigh_everything, samples_for(name, 4));
    EXPECT_GT(chain.size(), 1U);
    EXPECT_NO_THROW(check_whole_model(chain, samples_for(name, 3)));
  }
}

TEST_F(ScriptChain, IsCutBetweenTheUsesOfOneParameter) {
  const MicroBatch micro = samples_for("t5", 4);
  const Chain chain = Chain::from_script(models_->path("t5"), weigh_everything, micro);
  std::size_t num_users = 0;  // of the embedding: source, target, scores
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const auto parameters = chain.stage(i).module()->named_parameters();
    num_users += parameters.contains("emb.weight") ? 1 : 0;
  }
  EXPECT_EQ(num_users, 3U);
  EXPECT_NO_THROW(check_whole_model(chain, micro));
}

TEST_F(ScriptChain, ADictionaryThatIsFilledOnTheWayCrossesNoCut) {
  const MicroBatch micro = samples_for("taps", 4);
  const Chain chain = script::cut_module(torch::jit::load(models_->path("taps")), weigh_everything,
                                         false, micro, every_cut);
  EXPECT_GT(chain.size(), 6U);  // of which each has one layer at most
}

TEST_F(ScriptChain, TheCheckNamesTheParameterThatDiffers) {
  const MicroBatch micro = samples_for("small", 4);
  const torch::jit::Module module = torch::jit::load(models_->path("small"));
  const Chain chain = Chain::from_script(module, weigh_everything, micro);
  check_whole_model(chain, micro);
  // A stage that is not what the model does: its weight is a copy.
  Chain other;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    Stage& stage = chain.stage(i);
    other.add(stage.name(), stage.module(),
              [&stage, i](const std::vector<at::Tensor>& inputs, const MicroBatch& batch) {
                std::vector<at::Tensor> outputs = stage.forward(inputs, batch, 0);
                if (i == 0) outputs[0] = outputs[0] * 1.5;
                return outputs;
              });
  }
  other.set_whole(chain.whole());
  try {
    check_whole_model(other, micro);
    FAIL() << "the difference was not found";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("weight"), std::string::npos) << error.what();
  }
}

TEST_F(ScriptChain, BuffersAreWrittenOnceHoweverOftenAStageRuns) {
  const MicroBatch micro = samples_for("power", 4);
  const Chain chain = Chain::from_script(models_->path("power"), weigh_everything, micro);
  const at::Tensor before = chain.named_buffers().at(0).second.clone();
  check_whole_model(chain, micro);
  EXPECT_TRUE(torch::equal(before, chain.named_buffers().at(0).second));
}

TEST_F(ScriptChain, NamesAreTheModels) {
  const Chain chain = Chain::from_script(models_->path("resnet"), LossKind::kCrossEntropy,
                                         samples_for("resnet", 4));
  const torch::jit::Module module = torch::jit::load(models_->path("resnet"));
  std::set<std::string> theirs, ours;
  for (const auto& parameter : module.named_parameters()) theirs.insert(parameter.name);
  for (const auto& parameter : chain.named_parameters()) ours.insert(parameter.first);
  EXPECT_EQ(ours, theirs);
}

TEST_F(ScriptChain, EqualBlocksAreOfOneKind) {
  const MicroBatch micro = samples_for("resnet", 4);
  const Chain chain = Chain::from_script(models_->path("resnet"), LossKind::kCrossEntropy, micro);
  const std::optional<ChainProfile> profile = profile_chain(chain, micro);
  ASSERT_TRUE(profile);
  EXPECT_LT(profile->num_distinct, static_cast<std::int64_t>(chain.size()));
}

TEST_F(ScriptChain, ALongSkipIsCountedOnce) {
  const MicroBatch micro = samples_for("unet", 8);
  const Chain chain = Chain::from_script(models_->path("unet"), weigh_everything, micro);
  const std::optional<ChainProfile> profile = profile_chain(chain, micro);
  ASSERT_TRUE(profile);
  bool carries = false;
  for (const StageCosts& stage : profile->grads_preallocated.stages)
    carries |= !stage.carried.empty();
  EXPECT_TRUE(carries);

  ChainSolver solver(profile->grads_preallocated);
  Executor executor(chain);
  for (at::Tensor& parameter : chain.parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t floor = solver.smallest_budget_bytes(), ample = solver.ample_budget_bytes();
  for (int i = 0; i <= 6; ++i) {
    const Schedule plan = solver.schedule(floor + (ample - floor) * i / 6);
    const std::int64_t before = meter.live_bytes();
    meter.reset_peak();
    executor.accumulate(micro, plan.operations, 1.0);
    const std::int64_t measured = meter.peak_bytes() - before;
    EXPECT_LE(measured, plan.peak_bytes) << i;
    EXPECT_GE(1.02 * static_cast<double>(measured) + 4096, static_cast<double>(plan.peak_bytes))
        << i << ": " << measured;
    EXPECT_EQ(meter.live_bytes(), before) << i;
  }
  for (at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
}

// Bytes that are live between forward and backward, at one option of every stage.
std::int64_t kept_bytes(const ChainProfile& profile, std::size_t option) {
  std::int64_t bytes = 0;
  for (const StageCosts& stage : profile.grads_preallocated.stages)
    bytes += stage.options[std::min(option, stage.options.size() - 1)].kept_bytes;
  return bytes;
}

TEST_F(ScriptChain, SelectiveOptionsKeepLess) {
  for (const char* name : {"resnet", "unet", "t5"}) {
    SCOPED_TRACE(name);
    const MicroBatch micro = samples_for(name, 8);
    const Chain chain = Chain::from_script(models_->path(name), weigh_everything, micro);
    const std::optional<ChainProfile> profile = profile_chain(chain, micro);
    ASSERT_TRUE(profile);
    EXPECT_LT(kept_bytes(*profile, 1), kept_bytes(*profile, 0));
    // Not always less than option 1: what a product makes may be larger than what it reads.
    EXPECT_LT(kept_bytes(*profile, 2), kept_bytes(*profile, 0));
    EXPECT_NO_THROW(check_whole_model(chain, micro)) << "which tries every option";
  }
}

TEST_F(ScriptChain, OptionsReachIntoBranchesOnShapes) {
  const MicroBatch few = samples_for("branches", 2), many = samples_for("branches", 8);
  const auto module = torch::jit::load(models_->path("branches"));
  const std::vector<script::Cut const*> none;
  const auto in_one_piece = [&](const script::CutGraph&, const script::Signature&) { return none; };
  const Chain chain = script::cut_module(module, weigh_everything, false, few, in_one_piece);
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.name != "norm.running_mean") continue;
    EXPECT_FALSE(buffer.value.any().item<bool>()) << "left as it was";
  }
  ASSERT_EQ(chain.size(), 1U);
  const std::optional<ChainProfile> as_seen = profile_chain(chain, few);
  ASSERT_TRUE(as_seen);
  // The norm, SiLU, the product with 2 and GELU, of which backward needs three to be kept.
  EXPECT_LE(kept_bytes(*as_seen, 1), kept_bytes(*as_seen, 0) - 2 * (64 * 2 * 4));
  EXPECT_NO_THROW(check_whole_model(chain, few));
  EXPECT_NO_THROW(check_whole_model(chain, many)) << "which takes the other branch";
  const std::optional<ChainProfile> other = profile_chain(chain, many);
  ASSERT_TRUE(other);
  EXPECT_EQ(kept_bytes(*other, 1), kept_bytes(*other, 0));
}

TEST_F(ScriptChain, SelectiveOptionsLeaveNothingBehind) {
  const MicroBatch micro = samples_for("unet", 4);
  const Chain chain = Chain::from_script(models_->path("unet"), weigh_everything, micro);
  std::vector<Operation> operations = keep_everything(chain.size());
  for (Operation& operation : operations)
    operation.option =
        static_cast<int>(chain.stage(static_cast<std::size_t>(operation.stage)).options().size()) -
        1;
  Executor executor(chain);
  for (at::Tensor& parameter : chain.parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  executor.accumulate(micro, operations, 1.0);
  const std::int64_t before = MemoryMeter::instance().live_bytes();
  for (int i = 0; i < 3; ++i) executor.accumulate(micro, operations, 1.0);
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), before);
  for (at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
}

TEST_F(ScriptChain, AModelsOwnLossIsTheMean) {
  const MicroBatch micro = samples_for("own_loss", 4);
  const Chain chain = Chain::from_script(models_->path("own_loss"), LossKind::kModel, micro);
  check_whole_model(chain, micro);
  const torch::jit::Module module = torch::jit::load(models_->path("own_loss"));
  torch::jit::Method forward = module.get_method("forward");
  const at::Tensor mean = forward({micro.inputs[0], micro.targets[0]}).toTensor();
  const MicroResult result = Executor(chain).accumulate(micro, keep_everything(chain.size()), 1.0);
  EXPECT_NEAR(result.loss_sum, 4 * mean.item<double>(), 1e-5);
}

TEST_F(ScriptChain, EvaluationIsTheModelsAndLeavesItTraining) {
  const MicroBatch micro = samples_for("small", 6);
  torch::jit::Module module = torch::jit::load(models_->path("small"));
  const Chain chain = Chain::from_script(module, LossKind::kCrossEntropy, micro);
  chain.train(false);
  const std::vector<at::Tensor> results = Executor(chain).evaluate(micro);
  chain.train(true);
  for (const torch::jit::Module& each : module.modules()) EXPECT_TRUE(each.is_training());
  module.eval();
  const at::Tensor scores = module.forward({micro.inputs[0]}).toTensor();
  module.train();
  ASSERT_EQ(results.size(), 3U);
  EXPECT_TRUE(torch::equal(results[0], summed_cross_entropy({scores}, micro)));
  EXPECT_TRUE(torch::equal(results[1], count_correct({scores}, micro)));
  EXPECT_TRUE(torch::equal(results[2], scores.argmax(1))) << "the classes, for F1";
}

TEST_F(ScriptChain, AnEncoderThatEvaluatesInOneCallDoesSoUnderAutocast) {
  const MicroBatch micro = samples_for("encoder", 4);
  const Chain chain = Chain::from_script(models_->path("encoder"), LossKind::kCrossEntropy, micro);
  const torch::NoGradGuard no_grad;  // PyTorch takes its fused call where no gradient is wanted
  chain.train(false);
  const at::Tensor loss = Executor(chain).evaluate(micro).at(0);
  const Autocast autocast(torch::kCPU, torch::kBFloat16);
  EXPECT_TRUE(torch::equal(Executor(chain).evaluate(micro).at(0), loss));
}

TEST_F(ScriptChain, SavesWhatItTrained) {
  const MicroBatch micro = samples_for("resnet", 4);
  const Chain chain = Chain::from_script(models_->path("resnet"), LossKind::kCrossEntropy, micro);
  {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : chain.parameters()) parameter.add_(0.01);
  }
  const std::string path = models_->folder() + "/saved.pt";
  chain.whole()->save(path);
  const Chain again = Chain::from_script(path, LossKind::kCrossEntropy, micro);
  chain.train(false);
  again.train(false);
  EXPECT_TRUE(torch::equal(Executor(chain).evaluate(micro)[0], Executor(again).evaluate(micro)[0]));
}

TEST_F(ScriptChain, LossesAreThoseOfPyTorch) {
  MicroBatch micro;
  micro.num_samples = micro.num_items = 3;
  const at::Tensor scores = torch::randn({3, 5});
  micro.targets = {torch::rand({3, 5})};
  EXPECT_NEAR(make_loss(LossKind::kMse)({scores}, micro).item<double>(),
              3 * torch::mse_loss(scores, micro.targets[0]).item<double>(), 1e-5);
  EXPECT_NEAR(make_loss(LossKind::kBceWithLogits)({scores}, micro).item<double>(),
              3 * torch::binary_cross_entropy_with_logits(scores, micro.targets[0]).item<double>(),
              1e-5);
  micro.targets = {torch::randint(0, 7, {3, 4})};
  const at::Tensor tokens = torch::randn({3, 4, 7});
  EXPECT_NEAR(make_loss(LossKind::kCrossEntropy)({tokens}, micro).item<double>(),
              12 * torch::cross_entropy_loss(tokens.flatten(0, 1), micro.targets[0].flatten())
                       .item<double>(),
              1e-4);
}

// What the error says, or nothing.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(ScriptChain, WhatCannotBeTrainedIsRefusedWithARemedy) {
  const MicroBatch micro = samples_for("small", 4);
  const auto open = [&](const char* name) {
    return error_of(
        [&] { Chain::from_script(models_->path(name), LossKind::kCrossEntropy, micro); });
  };
  EXPECT_NE(open("eval_traced").find("model.train()"), std::string::npos) << open("eval_traced");
  EXPECT_NE(open("frozen").find("frozen"), std::string::npos) << open("frozen");
  EXPECT_NE(open("state_dict").find("torch.jit.script"), std::string::npos);
  EXPECT_NE(open("no_such_file").find("no_such_file.pt"), std::string::npos);
  const Chain chain =
      Chain::from_script(models_->path("no_gradient"), LossKind::kCrossEntropy, micro);
  EXPECT_NE(error_of([&] { check_whole_model(chain, micro); }).find("no_grad"), std::string::npos);
}

TEST_F(ScriptChain, DataThatDoesNotFitIsADataError) {
  MicroBatch wide = samples_for("small", 4);
  wide.inputs[0] = torch::randn({4, 17});
  EXPECT_THROW(Chain::from_script(models_->path("small"), LossKind::kCrossEntropy, wide),
               DataError);
  const Chain chain =
      Chain::from_script(models_->path("small"), LossKind::kCrossEntropy, samples_for("small", 4));
  EXPECT_THROW(Executor(chain).accumulate(wide, keep_everything(chain.size()), 1.0), DataError);
  const std::string of_whole = error_of([&] { chain.whole()->loss(wide); });
  EXPECT_NE(of_whole.find("4x17"), std::string::npos) << "the operator's words: " << of_whole;
}

TEST_F(ScriptChain, MemoryThatRunsOutInTheWholeModelIsNoDataError) {
  const MicroBatch micro = samples_for("small", 4);
  const Chain chain = Chain::from_script(models_->path("small"), LossKind::kCrossEntropy, micro);
  MemoryMeter& meter = MemoryMeter::instance();
  meter.set_cap(meter.live_bytes() + micro.inputs[0].nbytes());  // forward clones its inputs
  EXPECT_THROW(chain.whole()->loss(micro), OutOfBudget);
  meter.set_cap(0);
}

}  // namespace
}  // namespace headroom
