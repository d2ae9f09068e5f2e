// Random graphs at random cuts, options and budgets: the numbers of the whole model, the memory
// that was predicted, and nothing left behind.
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/chain_solver.h>
#include "execute/profile.h"
#include "model/script_program.h"

#include "model/script_models.h"
#include "support/scale.h"

#include <torch/script.h>

#include <random>

namespace headroom {
namespace {

std::vector<at::Tensor> gradients_of(const Chain& chain) {
  std::vector<at::Tensor> gradients;
  for (at::Tensor& parameter : chain.parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined() || (a[i].defined() && !torch::equal(a[i], b[i])))
      return false;
  }
  return a.size() == b.size();
}

class RandomGraphs : public ::testing::Test {
 protected:
  std::mt19937_64 random_{16};

  std::vector<const script::Cut*> some_cuts(const script::CutGraph& graph) {
    std::vector<const script::Cut*> cuts;
    for (const script::Cut& cut : graph.cuts) {
      if (random_() % 2 == 0 && script::may_follow(cut, cuts)) cuts.push_back(&cut);
    }
    return cuts;
  }

  // At a random budget: the gradients of keeping everything, in no more memory than predicted.
  void run_at_some_budget(const Chain& chain, const MicroBatch& micro) {
    const std::optional<ChainProfile> profile = profile_chain(chain, micro);
    ASSERT_TRUE(profile);
    ChainSolver solver(profile->grads_unallocated);
    const std::int64_t floor = solver.smallest_budget_bytes();
    const std::int64_t ample = solver.ample_budget_bytes();
    const Schedule schedule =
        solver.schedule(floor + static_cast<std::int64_t>(
                                    random_() % static_cast<std::uint64_t>(ample - floor + 1)));
    const RandomState start = RandomState::capture();
    Executor executor(chain);
    executor.accumulate(micro, keep_everything(chain.size()), 1.0);
    const std::vector<at::Tensor> kept = gradients_of(chain);
    start.restore();
    MemoryMeter& meter = MemoryMeter::instance();
    const std::int64_t before = meter.live_bytes();
    meter.reset_peak();
    executor.accumulate(micro, schedule.operations, 1.0);
    EXPECT_LE(meter.peak_bytes() - before, schedule.peak_bytes);
    EXPECT_TRUE(same_bits(kept, gradients_of(chain)));
    EXPECT_EQ(meter.live_bytes(), before);
  }
};

TEST_F(RandomGraphs, AreThemselvesAtRandomCutsAndBudgets) {
  const int num_graphs = testing::scaled(75);
  const testing::ScriptModels models("graphs 1000 " + std::to_string(num_graphs));
  for (int i = 0; i < num_graphs && !HasFailure(); ++i) {
    SCOPED_TRACE("graph " + std::to_string(i));
    seed_everything(static_cast<std::uint64_t>(i));
    const MicroBatch micro = testing::samples_for("graph", 4);
    const Chain chain = script::cut_module(
        torch::jit::load(models.path("graph_" + std::to_string(i))), testing::weigh_everything,
        false, micro, [this](const script::CutGraph& graph, const script::Signature&) {
          return some_cuts(graph);
        });
    EXPECT_NO_THROW(check_whole_model(chain, micro));
    run_at_some_budget(chain, micro);
  }
}

TEST(ScriptChainMemory, DoesNotGrowOverUpdates) {
  const testing::ScriptModels models;
  for (const char* name : {"control", "unet"}) {
    SCOPED_TRACE(name);
    const MicroBatch micro = testing::samples_for(name, 4);
    const Chain chain = Chain::from_script(models.path(name), testing::weigh_everything, micro);
    std::vector<Operation> operations = keep_everything(chain.size());
    for (Operation& operation : operations) {
      const Stage& stage = chain.stage(static_cast<std::size_t>(operation.stage));
      operation.option = static_cast<int>(stage.options().size()) - 1;  // keeps the least
    }
    Executor executor(chain);
    const auto step = [&] {
      executor.accumulate(micro, operations, 1.0);
      for (at::Tensor& parameter : chain.parameters()) parameter.mutable_grad() = at::Tensor();
    };
    step();
    const std::int64_t before = MemoryMeter::instance().live_bytes();
    const int num_updates = testing::scaled(250);
    for (int i = 0; i < num_updates; ++i) step();
    EXPECT_EQ(MemoryMeter::instance().live_bytes(), before);
  }
}

}  // namespace
}  // namespace headroom
