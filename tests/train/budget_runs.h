#pragma once

// Small training runs under a budget, for the tests of layer train.

#include <headroom/core/random.h>
#include <headroom/data/dataset.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/train/trainer.h>

#include "support/zoo_data.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

struct RunCase {
  std::string model;
  std::string config;
  std::int64_t global_batch = 8;
  std::int64_t micro_batch = 0;  // 0: free
  std::string optim = "adamw";
  bool spills = false;  // may put boundaries on disk
  bool computes_in_half = false;
};

// A folder that is gone when the test ends.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              ("headroom_" + name + std::to_string(::getpid()))) {
    std::filesystem::remove_all(path_);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline TrainingArguments arguments_of(const RunCase& run, std::int64_t budget_bytes,
                                      const std::string& folder) {
  TrainingArguments arguments;
  arguments.model = run.model;
  arguments.model_config = run.config;
  arguments.dataset = "synthetic";
  arguments.global_batch_size = run.global_batch;
  arguments.per_device_train_batch_size = run.micro_batch;
  arguments.memory_budget_bytes = budget_bytes;
  arguments.optim = run.optim;
  arguments.learning_rate = 1e-3;
  arguments.max_steps = 5;
  arguments.logging_steps = 1;
  arguments.disable_tqdm = true;
  arguments.report_to = "none";
  arguments.output_dir = folder;
  if (run.computes_in_half) {
    arguments.bf16 = true;
    arguments.half_precision_backend = "autocast";
  }
  if (run.spills) {
    std::filesystem::create_directories(folder);
    arguments.spill_dir = folder;
  }
  return arguments;
}

inline std::shared_ptr<const Dataset> data_for(const ModelInput& input) {
  return testing::synthetic_data(input, 256, 7);
}

// A dataset that lowers the cap when it is asked for a certain micro-batch, as another process
// would.
class CapLoweringData final : public Dataset {
 public:
  CapLoweringData(std::shared_ptr<const Dataset> inner, std::int64_t at_load,
                  std::int64_t cap_bytes)
      : inner_(std::move(inner)), at_load_(at_load), cap_bytes_(cap_bytes) {}
  std::int64_t size() const override { return inner_->size(); }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    if (loads_++ == at_load_) MemoryMeter::instance().set_cap(cap_bytes_);
    return inner_->load(indices);
  }
  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    return inner_->count_items(indices);
  }

 private:
  mutable std::int64_t loads_ = 0;
  std::shared_ptr<const Dataset> inner_;
  std::int64_t at_load_;
  std::int64_t cap_bytes_;
};

// A model and its data, from the same seed each time, with a trainer.
struct PreparedRun {
  using Wrap = std::function<std::shared_ptr<const Dataset>(std::shared_ptr<const Dataset>)>;

  PreparedRun(const RunCase& run, const TrainingArguments& arguments, const Wrap& wrap = {},
              const std::shared_ptr<Communicator>& communicator = nullptr) {
    MemoryMeter::instance().set_cap(0);
    seed_everything(1);
    const ZooModel model = make_model(run.model, run.config);
    std::shared_ptr<const Dataset> data = data_for(model.input);
    if (wrap) data = wrap(data);
    trainer = std::make_unique<Trainer>(arguments, model.chain, data, nullptr, communicator);
  }
  ~PreparedRun() { MemoryMeter::instance().set_cap(0); }

  std::unique_ptr<Trainer> trainer;
};

inline TrainResults train(const RunCase& run, std::int64_t budget_bytes,
                          const std::string& folder) {
  return PreparedRun(run, arguments_of(run, budget_bytes, folder)).trainer->train();
}

struct BudgetRange {
  std::int64_t floor_bytes = 0;
  std::int64_t ample_bytes = 0;
};

// From the least memory that a run with a fixed micro-batch can use to what keeping everything
// takes.
inline BudgetRange budget_range(const RunCase& run, const TrainingArguments& ample_arguments) {
  PreparedRun prepared(run, ample_arguments);
  const RunPlan plan = prepared.trainer->plan();
  const auto& owners = plan.bytes_by_owner;
  std::int64_t fixed =
      owners.at("weights") + owners.at("optimizer") + plan.batch.input_bytes + owners.at("other");
  if (plan.num_micro_batches() > 1) fixed += owners.at("gradients");
  const ChainSolver solver(plan.costs);
  const std::int64_t update = plan.batch.peaks.update_bytes;
  return {std::max(fixed + solver.smallest_budget_bytes(), update),
          std::max(fixed + solver.ample_budget_bytes(), update)};
}

inline BudgetRange budget_range(const RunCase& run, const std::string& folder) {
  constexpr std::int64_t kPlenty = std::int64_t{1} << 40;
  return budget_range(run, arguments_of(run, kPlenty, folder));
}

}  // namespace headroom
