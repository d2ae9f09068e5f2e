// Adapters on TorchScript models: the module's weights do not change, plans know what training
// takes, and snapshots hold the adapters.
#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/model/adapters.h>
#include <headroom/model/safetensors.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/train/trainer.h>
#include "core/log.h"

#include "model/script_models.h"
#include "train/budget_runs.h"
#include "train/predicted_peak.h"

#include <algorithm>
#include <memory>
#include <string>

namespace headroom {
namespace {

constexpr int kNumAdapterBudgets = 6;

struct AdaptedScript {
  const char* name;
  std::int64_t side;  // of its images
  std::size_t num_adapted;
};
constexpr AdaptedScript kEncoder{"encoder", 4, 10}, kEncoderTrace{"encoder_traced", 4, 10},
    kResnet{"resnet", 16, 1};  // whose head alone is linear

class AdaptedRun {
 public:
  AdaptedRun(const std::string& path, const AdaptedScript& script,
             const TrainingArguments& arguments) {
    MemoryMeter::instance().set_cap(0);
    seed_everything(1);
    const std::shared_ptr<const Dataset> data =
        make_synthetic_images(64, 1, script.side, script.side, 10, 7);
    const MicroBatch samples = data->load({0, 1});
    {
      const OwnerScope owner(Owner::kWeights);
      chain = Chain::from_script(path, LossKind::kCrossEntropy, samples);
      add_adapters(chain, {4, 8.0, 0.1, {}}, "", samples);
    }
    trainer = std::make_unique<Trainer>(arguments, chain, data);
  }
  ~AdaptedRun() { MemoryMeter::instance().set_cap(0); }

  Chain chain;
  std::unique_ptr<Trainer> trainer;
};

class ScriptAdapterTraining : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { models_ = std::make_unique<testing::ScriptModels>(); }
  static void TearDownTestSuite() { models_.reset(); }
  ScriptAdapterTraining() { set_log_quiet(true); }

  static AdaptedRun run(const AdaptedScript& script, const TrainingArguments& arguments) {
    return AdaptedRun(models_->path(script.name), script, arguments);
  }

  TrainingArguments arguments(std::int64_t budget_bytes = 0) const {
    TrainingArguments result =
        arguments_of(RunCase{"", "", 16, 16, "adamw"}, budget_bytes, folder_.path());
    result.model = "model.pt";
    result.max_steps = 4;
    return result;
  }

  static std::unique_ptr<testing::ScriptModels> models_;
  const ScratchFolder folder_{"script_adapters"};
};

std::unique_ptr<testing::ScriptModels> ScriptAdapterTraining::models_;

TEST_F(ScriptAdapterTraining, ChangesTheAdaptersAlone) {
  for (const AdaptedScript& script : {kEncoder, kEncoderTrace, kResnet}) {
    SCOPED_TRACE(script.name);
    AdaptedRun training = run(script, arguments());
    std::vector<std::pair<at::Tensor, at::Tensor>> frozen;  // with their values
    std::int64_t trained_bytes = 0;
    const auto buffers = training.chain.named_buffers();
    for (const auto& [name, tensor] : training.chain.named_tensors()) {
      const bool is_buffer =
          std::any_of(buffers.begin(), buffers.end(),
                      [&, key = name](const auto& buffer) { return buffer.first == key; });
      if (!tensor.requires_grad() && !is_buffer) frozen.emplace_back(tensor, tensor.clone());
    }
    std::vector<at::Tensor> before;
    for (const at::Tensor& parameter : training.chain.parameters()) {
      trained_bytes += static_cast<std::int64_t>(parameter.nbytes());
      before.push_back(parameter.detach().clone());
    }
    ASSERT_EQ(before.size(), 2 * script.num_adapted);
    ASSERT_FALSE(frozen.empty());
    const TrainResults results = training.trainer->train();
    for (const auto& [tensor, value] : frozen) EXPECT_TRUE(tensor.equal(value));
    const std::vector<at::Tensor> after = training.chain.parameters();
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_FALSE(after[i].equal(before[i])) << i;
    EXPECT_LE(results.peak_bytes_by_owner.at("gradients"), trained_bytes + trained_bytes / 10);
    EXPECT_LE(results.peak_bytes_by_owner.at("optimizer"), 2 * trained_bytes + trained_bytes / 5);
  }
}

TEST_F(ScriptAdapterTraining, EveryBudgetGivesTheSameNumbersAndThePredictedPeak) {
  for (const AdaptedScript& script : {kEncoder, kEncoderTrace, kResnet}) {
    SCOPED_TRACE(script.name);
    const RunPlan plan = run(script, arguments(std::int64_t{1} << 40)).trainer->plan();
    const ChainSolver solver(plan.costs);
    const std::int64_t fixed = plan.predicted_peak_bytes() - solver.ample_budget_bytes(),
                       floor = std::max(fixed + solver.smallest_budget_bytes(),
                                        plan.batch.peaks.update_bytes);
    const std::string expected = run(script, arguments()).trainer->train().weights_sha256;
    // A stage may let go of its output's gradient earlier than is counted, which shows in a net of
    // a few hundred kilobytes.
    std::int64_t largest_gradient = 0;
    for (const StageCosts& stage : plan.costs.stages)
      largest_gradient = std::max(largest_gradient, stage.grad_bytes);
    for (int i = 0; i < kNumAdapterBudgets; ++i) {
      const std::int64_t budget =
          floor + (plan.predicted_peak_bytes() - floor) * i / (kNumAdapterBudgets - 1);
      expect_as_predicted(run(script, arguments(budget)).trainer->train(), expected,
                          largest_gradient);
    }
  }
}

TEST_F(ScriptAdapterTraining, SnapshotsContinueBitByBitAndHoldTheAdapters) {
  const std::string expected = run(kEncoder, arguments()).trainer->train().weights_sha256;
  TrainingArguments parts = arguments();
  parts.save_steps = 3;
  AdaptedRun saving = run(kEncoder, parts);
  saving.trainer->train();
  const std::string snapshot = folder_.path() + "/snapshot-3";
  const auto saved = load_safetensors(snapshot + "/model.safetensors");
  EXPECT_EQ(saved.size(), saving.chain.parameters().size()) << "the frozen model is no part of it";
  for (const auto& [name, parameter] : saving.chain.named_parameters())
    EXPECT_EQ(saved.count(name), 1U) << name;
  parts.resume_from_checkpoint = snapshot;
  EXPECT_EQ(run(kEncoder, parts).trainer->train().weights_sha256, expected);
}

}  // namespace
}  // namespace headroom
