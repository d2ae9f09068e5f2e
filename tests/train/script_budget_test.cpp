// A TorchScript model under budgets: one hash, and the peak that was predicted.
#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/train/trainer.h>

#include "model/script_models.h"
#include "train/budget_runs.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>

namespace headroom {
namespace {

constexpr int kNumScriptBudgets = 6;

class ScriptRun {
 public:
  ScriptRun(const std::string& path, const TrainingArguments& arguments) {
    MemoryMeter::instance().set_cap(0);
    seed_everything(1);
    const std::shared_ptr<const Dataset> data = make_synthetic_images(64, 1, 16, 16, 10, 7);
    const Chain chain = Chain::from_script(path, LossKind::kCrossEntropy, data->load({0, 1}));
    trainer = std::make_unique<Trainer>(arguments, chain, data);
  }
  ~ScriptRun() { MemoryMeter::instance().set_cap(0); }

  std::unique_ptr<Trainer> trainer;
};

TEST(ScriptBudget, OneHashAndThePredictedPeakAtSixBudgets) {
  const testing::ScriptModels models;
  const ScratchFolder folder("script_budget");
  RunCase run;
  run.global_batch = 16;
  run.micro_batch = 16;
  const std::string path = models.path("resnet");
  TrainingArguments arguments = arguments_of(run, std::int64_t{1} << 40, folder.path());
  arguments.model = path;
  arguments.max_steps = 3;

  const RunPlan plan = ScriptRun(path, arguments).trainer->plan();
  const auto& owners = plan.bytes_by_owner;
  const std::int64_t fixed =
      owners.at("weights") + owners.at("optimizer") + owners.at("inputs") + owners.at("other");
  const ChainSolver solver(plan.costs);
  const std::int64_t floor = fixed + solver.smallest_budget_bytes();
  const std::int64_t ample = fixed + solver.ample_budget_bytes();
  std::set<std::string> hashes;
  for (int i = 0; i < kNumScriptBudgets; ++i) {
    SCOPED_TRACE("budget " + std::to_string(i));
    arguments.memory_budget_bytes = floor + (ample - floor) * i / (kNumScriptBudgets - 1);
    const TrainResults results = ScriptRun(path, arguments).trainer->train();
    hashes.insert(results.weights_sha256);
    EXPECT_LE(results.peak_memory_bytes, arguments.memory_budget_bytes);
    EXPECT_LE(results.peak_memory_bytes, results.predicted_peak_bytes);
    EXPECT_LE(static_cast<double>(results.predicted_peak_bytes),
              1.02 * static_cast<double>(results.peak_memory_bytes));
  }
  EXPECT_EQ(hashes.size(), 1U);
}

}  // namespace
}  // namespace headroom
