// Training with frozen weights: what is not trained does not change, has no gradient and no state,
// and plans know it to the byte.
#include <headroom/model/adapters.h>
#include <headroom/train/estimate.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include "model/requested_model.h"
#include "train/budget_runs.h"
#include "train/predicted_peak.h"
#include "train/training_support.h"

namespace headroom {
namespace {

constexpr int kNumFrozenBudgets = 6;

struct FrozenCase {
  const char* name;
  const char* model;
  const char* config;
  std::int64_t lora_r = 0;
  const char* targets = "";
  const char* freeze = "";
};

const char* const kAdaptedGpt =
    "n_layer=4,n_head=2,n_embd=32,block_size=32,vocab_size=64,dropout=0.1";

const FrozenCase kCases[] = {
    {"lora", "gpt", kAdaptedGpt, 4},
    {"lora_all", "gpt", kAdaptedGpt, 2, "all-linear"},
    {"llama", "llama",
     "num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,hidden_size=32,"
     "intermediate_size=88,max_position_embeddings=32,vocab_size=64",
     4, "q_proj,v_proj,down_proj"},
    {"upper_layers", "gpt", kAdaptedGpt, 0, "", "embedding,block0,block1"},
    {"no_mlp", "gpt", kAdaptedGpt, 0, "", "*.mlp.*"},
    {"images", "resnet", "blocks=4,width=4,rows=10,columns=10,norm=0", 0, "", "stem*"}};

TrainingArguments arguments_for(const FrozenCase& which, std::int64_t budget_bytes,
                                const std::string& folder) {
  TrainingArguments arguments =
      arguments_of({which.model, which.config, 8, 4, "adamw"}, budget_bytes, folder);
  arguments.lora_r = which.lora_r;
  arguments.lora_target_modules = which.targets;
  arguments.lora_dropout = which.lora_r > 0 ? 0.1 : 0.0;
  arguments.freeze = which.freeze;
  return arguments;
}

struct FrozenRun {
  explicit FrozenRun(const TrainingArguments& arguments) {
    MemoryMeter::instance().set_cap(0);
    seed_everything(1);
    model = make_requested_model(arguments);
    trainer = std::make_unique<Trainer>(arguments, model.chain, data_for(model.input));
  }
  ~FrozenRun() { MemoryMeter::instance().set_cap(0); }

  ZooModel model;
  std::unique_ptr<Trainer> trainer;
};

class FrozenWeights : public ::testing::TestWithParam<FrozenCase> {
 protected:
  FrozenWeights() { set_log_quiet(true); }
};

TEST_P(FrozenWeights, DoNotChangeABitAndHaveNeitherGradientNorState) {
  const ScratchFolder folder("frozen");
  FrozenRun run(arguments_for(GetParam(), 0, folder.path()));
  std::vector<std::pair<at::Tensor, at::Tensor>> frozen;  // with their values
  std::int64_t trained_bytes = 0, all_bytes = 0;
  for (const auto& [name, tensor] : run.model.chain.named_tensors()) {
    all_bytes += static_cast<std::int64_t>(tensor.nbytes());
    if (!tensor.requires_grad() && tensor.is_floating_point())
      frozen.emplace_back(tensor, tensor.clone());
  }
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : run.model.chain.parameters()) {
    trained_bytes += static_cast<std::int64_t>(parameter.nbytes());
    before.push_back(parameter.detach().clone());
  }
  ASSERT_LT(trained_bytes, all_bytes);
  const TrainResults results = run.trainer->train();
  for (const auto& [tensor, value] : frozen) EXPECT_TRUE(tensor.equal(value));
  const std::vector<at::Tensor> after = run.model.chain.parameters();
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_FALSE(after[i].equal(before[i])) << i;
  EXPECT_LE(results.peak_bytes_by_owner.at("gradients"), trained_bytes + trained_bytes / 10);
  EXPECT_LE(results.peak_bytes_by_owner.at("optimizer"), 2 * trained_bytes + trained_bytes / 5);
  EXPECT_GE(results.peak_bytes_by_owner.at("weights"), all_bytes - all_bytes / 100);
}

TEST_P(FrozenWeights, EveryBudgetGivesTheSameNumbersAndThePredictedPeak) {
  const ScratchFolder folder("frozen_budgets");
  constexpr std::int64_t kPlenty = std::int64_t{1} << 40;
  const RunPlan ample =
      FrozenRun(arguments_for(GetParam(), kPlenty, folder.path())).trainer->plan();
  const std::int64_t fixed = ample.predicted_peak_bytes() -
                             ChainSolver(ample.costs).ample_budget_bytes(),
                     floor = std::max(fixed + ChainSolver(ample.costs).smallest_budget_bytes(),
                                      ample.batch.peaks.update_bytes);
  const std::string expected =
      FrozenRun(arguments_for(GetParam(), 0, folder.path())).trainer->train().weights_sha256;
  for (int i = 0; i < kNumFrozenBudgets; ++i) {
    const std::int64_t budget =
        floor + (ample.predicted_peak_bytes() - floor) * i / (kNumFrozenBudgets - 1);
    expect_as_predicted(
        FrozenRun(arguments_for(GetParam(), budget, folder.path())).trainer->train(), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FrozenWeights, ::testing::ValuesIn(kCases),
                         [](const auto& which) { return std::string(which.param.name); });

TEST(AdapterSnapshots, ContinueBitByBitAndHoldTheAdaptersAlone) {
  set_log_quiet(true);
  const ScratchFolder whole("adapters_whole"), cut("adapters_cut");
  TrainingArguments arguments = arguments_for(kCases[0], 0, whole.path());
  const std::string expected = FrozenRun(arguments).trainer->train().weights_sha256;
  arguments.output_dir = cut.path();
  arguments.save_steps = 3;
  FrozenRun(arguments).trainer->train();
  std::uintmax_t weights = 0;
  for (const auto& entry : std::filesystem::directory_iterator(cut.path() + "/snapshot-3")) {
    weights = std::max(weights, entry.file_size());
  }
  EXPECT_LT(weights, std::uintmax_t{64} << 10) << "the frozen model is not part of it";
  arguments.resume_from_checkpoint = cut.path() + "/snapshot-3";
  EXPECT_EQ(FrozenRun(arguments).trainer->train().weights_sha256, expected);
}

TEST(AdapterEstimates, AreWhatTrainingTakes) {
  set_log_quiet(true);
  const ScratchFolder folder("adapter_estimate");
  const TrainingArguments arguments = arguments_for(kCases[1], 0, folder.path());
  const Estimate counted = estimate(arguments);
  const TrainResults measured = FrozenRun(arguments).trainer->train();
  EXPECT_NEAR(static_cast<double>(counted.policies.front().peak_bytes),
              static_cast<double>(measured.peak_memory_bytes),
              0.02 * static_cast<double>(measured.peak_memory_bytes));
}

}  // namespace
}  // namespace headroom
