// Plans that hold boundaries in other formats: on disk nothing changes, in half precision only what
// the rounding changes.
#include "execute/boundary_format.h"
#include <headroom/execute/executor.h>

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/schedule.h>
#include "execute/boundary_store.h"
#include "execute/profile.h"
#include "execute/stored_tensor.h"
#include "plan/simulate.h"

#include "support/zoo_data.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <tuple>

namespace headroom {
namespace {

namespace fs = std::filesystem;

struct BoundaryModel {
  const char* name;
  const char* config;
};

const BoundaryModel kBoundaryModels[] = {
    {"mlp", "hidden=64,layers=6"},
    {"nin", "width=4,rows=14,columns=14"},
    {"resnet", "blocks=8,width=4,rows=10,columns=10"},
    {"gpt", "n_layer=5,n_head=2,n_embd=32,block_size=32,vocab_size=50,dropout=0.1"}};

class Folder {
 public:
  Folder()
      : path_(fs::temp_directory_path() / ("headroom_spill_test" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }
  bool is_empty() const { return fs::is_empty(path_); }

 private:
  fs::path path_;
};

MicroBatch batch_for(const ModelInput& input) {
  return testing::synthetic_data(input, 8, 3)->load({0, 1, 2, 3});
}

BoundaryFormat free_of_charge(KeepAs format) {
  return {kept_format(format).name, kept_format(format).size_ratio, 0.0, 0.0};
}

struct BoundaryOutcome {
  double loss = 0.0;
  std::vector<at::Tensor> tensors;  // gradients, then buffers
  Schedule plan;
  std::int64_t num_stores = 0;  // of boundaries in the format
};

struct RunOptions {
  std::optional<KeepAs> format = {};  // none: keeps everything
  std::optional<at::ScalarType> half = {};
  std::string folder = {};
  std::string policy = "every";
};

// The same schedule with every boundary that has a slot of its own in format 1.
std::vector<Operation> in_format(std::vector<Operation> operations, std::size_t num_stages) {
  std::vector<bool> is_kept(num_stages + 1);  // by boundary
  is_kept[0] = true;
  for (Operation& operation : operations) {
    const auto stage = static_cast<std::size_t>(operation.stage);
    if (operation.kind == OperationKind::kBackward) is_kept[stage + 1] = false;
    if (operation.kind != OperationKind::kForwardStore &&
        operation.kind != OperationKind::kForwardKeep)
      continue;
    operation.format = is_kept[stage] ? 0 : 1;
    if (operation.kind == OperationKind::kForwardKeep) is_kept[stage + 1] = true;
  }
  return operations;
}

// A policy with boundaries in the format, and every operation's bytes compared with the plan's.
BoundaryOutcome run_with_boundaries(const BoundaryModel& which, const RunOptions& run) {
  seed_everything(5);
  const ZooModel model = make_model(which.name, which.config);
  const MicroBatch micro = batch_for(model.input);
  BoundaryOutcome outcome;
  outcome.plan.operations = keep_everything(model.chain.size());
  ExecutorOptions options;
  options.keep_in_half = run.half;
  options.check_recomputed_values = true;
  options.spill_dir = run.folder;
  std::int64_t largest_boundary_bytes = 0;
  if (run.format) {
    ChainCosts costs = profile_chain(model.chain, micro, run.half)->grads_preallocated;
    costs.boundary_formats = {free_of_charge(*run.format)};
    const Schedule policy = schedule_of_policy(costs, parse_policy(run.policy));
    outcome.plan =
        schedule_from_operations(costs, in_format(policy.operations, model.chain.size()));
    options.boundary_formats = {*run.format};
    for (const StageCosts& stage : costs.stages)
      largest_boundary_bytes = std::max(largest_boundary_bytes, stage.output_bytes);
    for (const Operation& operation : outcome.plan.operations) {
      outcome.num_stores += operation.format;
    }
  }
  for (at::Tensor& parameter : model.chain.parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t before = meter.live_bytes();
  meter.reset_peak();
  if (run.format) {
    options.on_operation = [&](std::size_t i) {
      constexpr std::int64_t kScalarBytes =
          64;  // the number that the loss is scaled by is no part of a plan
      const std::int64_t live = meter.live_bytes() - before;
      const std::int64_t planned = outcome.plan.curve[i].live_bytes;
      const char* operation = operation_name(outcome.plan.operations[i].kind);
      EXPECT_LE(live, planned + kScalarBytes)
          << which.name << " after operation " << i << " (" << operation << ")";
      // In half precision small inputs are kept as they are, and counted; those of a stored
      // boundary need not be.
      if (!run.half) {
        EXPECT_GE(live, planned - kScalarBytes)
            << which.name << " after operation " << i << " (" << operation << ")";
      }
    };
  }
  Executor executor(model.chain, options);
  outcome.loss = executor.accumulate(micro, outcome.plan.operations, 0.25).loss_sum;
  if (run.format) {
    EXPECT_LE(meter.peak_bytes() - before, outcome.plan.peak_bytes) << which.name;
    // Plans assume that every backward reads its input again; a stage that does not need it there
    // spares that.
    if (!run.half) {
      EXPECT_GE(meter.peak_bytes() - before, outcome.plan.peak_bytes - largest_boundary_bytes)
          << which.name;
    }
  }
  EXPECT_EQ(meter.live_bytes(), before) << "a leak";
  for (const at::Tensor& parameter : model.chain.parameters())
    outcome.tensors.push_back(parameter.grad().clone());
  for (const auto& [name, buffer] : model.chain.named_buffers())
    outcome.tensors.push_back(buffer.clone());
  return outcome;
}

void expect_identical(const BoundaryOutcome& a, const BoundaryOutcome& b) {
  EXPECT_EQ(a.loss, b.loss);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i)
    EXPECT_TRUE(torch::equal(a.tensors[i], b.tensors[i])) << "tensor " << i;
}

TEST(SpilledBoundary, GivesTheSameBitsWithThePlannedBytes) {
  const Folder folder;
  for (const std::optional<at::ScalarType> half :
       {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kBFloat16)}) {
    for (const BoundaryModel& model : kBoundaryModels) {
      const BoundaryOutcome plain = run_with_boundaries(model, {std::nullopt, half});
      for (const char* policy : {"every", "log"}) {
        SCOPED_TRACE(std::string(model.name) + " " + policy + (half ? " in half precision" : ""));
        const BoundaryOutcome spilled =
            run_with_boundaries(model, {KeepAs::kDisk, half, folder.path(), policy});
        EXPECT_GT(spilled.num_stores, 0);
        expect_identical(spilled, plain);
        EXPECT_TRUE(folder.is_empty());
      }
    }
  }
}

TEST(HalfBoundary, IsCloseToExactAndTheSameEachTimeWithThePlannedBytes) {
  for (const KeepAs format : {KeepAs::kBf16, KeepAs::kFp16}) {
    for (const BoundaryModel& model : {kBoundaryModels[0], kBoundaryModels[3]}) {
      SCOPED_TRACE(model.name);
      const BoundaryOutcome exact = run_with_boundaries(model, {});
      const BoundaryOutcome rounded = run_with_boundaries(model, {format});
      EXPECT_GT(rounded.num_stores, 0);
      expect_identical(rounded, run_with_boundaries(model, {format}));
      EXPECT_NE(rounded.loss, exact.loss) << "nothing was rounded";
      EXPECT_NEAR(rounded.loss, exact.loss, 0.01 * exact.loss);
      for (std::size_t i = 0; i < exact.tensors.size(); ++i) {
        const double error = (rounded.tensors[i] - exact.tensors[i]).norm().item<double>();
        EXPECT_LE(error, 0.05 * exact.tensors[i].norm().item<double>() + 1e-6) << "tensor " << i;
      }
    }
  }
}

TEST(HalfPrecisionRun, HoldsItsBoundariesInHalf) {
  for (const BoundaryModel& which : kBoundaryModels) {
    seed_everything(5);
    const ZooModel model = make_model(which.name, which.config);
    const MicroBatch micro = batch_for(model.input);
    const ChainCosts full = profile_chain(model.chain, micro)->grads_preallocated;
    const ChainCosts half = profile_chain(model.chain, micro, at::kBFloat16)->grads_preallocated;
    // A sweep over all stages but the last, each boundary held: what the meter sees is the
    // boundaries alone.
    std::vector<Operation> operations;
    const auto last = static_cast<int>(model.chain.size());
    for (int stage = 0; stage + 1 < last; ++stage) {
      operations.push_back(
          {stage == 0 ? OperationKind::kForward : OperationKind::kForwardStore, stage, 0, 0});
    }
    std::int64_t expected = 0;
    for (int stage = 0; stage + 1 < last; ++stage) {
      const auto index = static_cast<std::size_t>(stage);
      EXPECT_EQ(2 * half.stages[index].output_bytes, full.stages[index].output_bytes)
          << which.name << " stage " << stage;
      expected += half.stages[index].output_bytes;
    }
    ExecutorOptions options;
    options.keep_in_half = at::kBFloat16;
    const std::int64_t before = MemoryMeter::instance().live_bytes();
    std::int64_t live = 0;
    options.on_operation = [&](std::size_t) {
      live = MemoryMeter::instance().live_bytes() - before;
    };
    Executor(model.chain, options).accumulate(micro, operations, 1.0);
    EXPECT_EQ(live, expected) << which.name;
  }
}

// Boundaries of several tensors: pieces of one storage, a transposed one, integers, and one that is
// not there.
Chain chain_of_many_tensors() {
  torch::nn::Linear in(12, 12), middle(4, 4), out(12, 3);
  Chain chain;
  chain.add("in", in.ptr(), [in](const auto& x, const MicroBatch& micro) mutable {
    const at::Tensor y = in(x[0]).tanh();                         // (B, 12)
    const std::vector<at::Tensor> parts = y.chunk(3, /*dim=*/1);  // (B, 4) each
    return std::vector<at::Tensor>{
        parts[0], parts[1], parts[2], (y * 2).t(), micro.targets[0] + 1, at::Tensor()};
  });
  const auto forward = [middle](const auto& x, const MicroBatch&) mutable {
    const at::Tensor changed = torch::sigmoid(middle(x[0] * x[1])) * x[2];
    return std::vector<at::Tensor>{changed, x[1], x[2], x[3] * x[3], x[4], x[5]};
  };
  for (const char* name : {"a", "b", "c", "d"}) chain.add(name, middle.ptr(), forward);
  chain.add("out", out.ptr(), [out](const auto& x, const MicroBatch& micro) mutable {
    const at::Tensor y = torch::cat({x[0], x[1], x[2]}, 1) + x[3].t() * x[4].unsqueeze(1);
    return std::vector<at::Tensor>{summed_cross_entropy({out(y)}, micro)};
  });
  return chain;
}

TEST(SpilledBoundary, BringsBackViewsStridesIntegersAndAbsentTensors) {
  const Folder folder;
  std::vector<std::vector<at::Tensor>> gradients;
  for (const bool spills : {false, true}) {
    seed_everything(2);
    const Chain chain = chain_of_many_tensors();
    const MicroBatch micro{{torch::randn({5, 12})}, {torch::tensor({0, 1, 2, 1, 0})}, 5, 5};
    std::vector<Operation> operations = keep_everything(chain.size());
    ExecutorOptions options;
    if (spills) {
      ChainCosts costs = profile_chain(chain, micro)->grads_preallocated;
      costs.boundary_formats = {free_of_charge(KeepAs::kDisk)};
      ChainSolver solver(costs);
      operations = solver.schedule(solver.smallest_budget_bytes()).operations;
      options.boundary_formats = {KeepAs::kDisk};
      options.spill_dir = folder.path();
    }
    Executor(chain, options).accumulate(micro, operations, 1.0);
    gradients.emplace_back();
    for (const at::Tensor& parameter : chain.parameters())
      gradients.back().push_back(parameter.grad());
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    EXPECT_TRUE(torch::equal(gradients[0][i], gradients[1][i])) << i;
}

TEST(SpilledBoundary, WritesOnceWhatBoundariesHandOn) {
  const Folder folder;
  const std::shared_ptr<SpillStore> store = kept_format(KeepAs::kDisk).make_store(folder.path());
  const at::Tensor skip = torch::randn({64, 64});
  StoredBoundary first({torch::randn({64, 64}), skip}, KeepAs::kDisk, store);
  first.drop();
  const std::int64_t written = store->traffic().bytes_written;
  at::Tensor handed_on = first.read()[1];
  StoredBoundary second({handed_on * 2, handed_on.t()}, KeepAs::kDisk, store, &first);
  second.drop();
  EXPECT_EQ(store->traffic().bytes_written - written, static_cast<std::int64_t>(skip.nbytes()));
  EXPECT_TRUE(torch::equal(second.read()[1], skip.t()));
  handed_on.add_(1);  // is another tensor from now on
  StoredBoundary third({handed_on}, KeepAs::kDisk, store, &first);
  third.drop();
  handed_on = at::Tensor();
  EXPECT_TRUE(torch::equal(third.read()[0], skip + 1));
}

// Files of this process may not grow beyond this while the limit lives: a disk that is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t max_bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit now{max_bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST(SpilledBoundary, AFullDiskIsABudgetErrorThatLeavesNothingBehind) {
  const Folder folder;
  const std::int64_t before = MemoryMeter::instance().live_bytes();
  try {
    const FullDisk full(6000);
    run_with_boundaries(kBoundaryModels[3], {KeepAs::kDisk, std::nullopt, folder.path()});
    FAIL() << "the disk was not full";
  } catch (const BudgetError& error) {
    EXPECT_NE(std::string(error.what()).find(folder.path()), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("16.00 KiB"), std::string::npos) << error.what();
  }
  EXPECT_EQ(MemoryMeter::instance().live_bytes(), before) << "a leak";
  EXPECT_TRUE(folder.is_empty());
}

TEST(SpilledBoundary, AFolderThatIsNotThereIsAConfigError) {
  ExecutorOptions options;
  options.boundary_formats = {KeepAs::kDisk};
  options.spill_dir = "/nowhere/to/spill";
  const ZooModel model = make_model("mlp", "hidden=8,layers=1");
  EXPECT_THROW(Executor(model.chain, options), ConfigError);
}

TEST(Executor, AFormatThatItWasNotToldOfIsAConfigError) {
  const ZooModel model = make_model("mlp", "hidden=8,layers=2");
  const MicroBatch micro = batch_for(model.input);
  Executor executor(model.chain);
  const std::vector<Operation> operations = {{OperationKind::kForward, 0, 0, 0},
                                             {OperationKind::kForwardStore, 1, 0, 1}};
  EXPECT_THROW(executor.accumulate(micro, operations, 1.0), ConfigError);
}

TEST(BoundaryFormatCosts, AreMeasuredForEveryFormat) {
  const Folder folder;
  for (const auto& [format, name, ratio] : {std::tuple{KeepAs::kBf16, "bf16", 0.5},
                                            {KeepAs::kFp16, "fp16", 0.5},
                                            {KeepAs::kDisk, "disk", 0.0}}) {
    const BoundaryFormat costs = measure_boundary_format(format, 1 << 20, folder.path());
    EXPECT_EQ(costs.name, name);
    EXPECT_EQ(costs.size_ratio, ratio);
    EXPECT_GT(costs.encode_ns_per_byte, 0.0);
    EXPECT_GT(costs.decode_ns_per_byte, 0.0);
  }
  EXPECT_TRUE(folder.is_empty());
}

}  // namespace
}  // namespace headroom
