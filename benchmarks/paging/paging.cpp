// What paging costs: one model is trained by the plan for a budget that pages it, and by the same
// schedule with everything in memory, interleaved, so that the two differ in nothing but the disk.
// For both, the seconds of an update and the weights; for the paged plan also what was predicted.
//   paging_benchmark FOLDER ROUNDS UPDATES MODEL GLOBAL_BATCH BUDGET [MODEL_CONFIG]
//   paging_benchmark /var/tmp 2 2 gpt2-medium 16 1536MiB block_size=512
#include <headroom/config/training_arguments.h>
#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/tokens.h>
#include <headroom/memory/meter.h>
#include <headroom/model/zoo.h>
#include <headroom/train/trainer.h>
#include "execute/static_pager.h"
#include "memory/spill_store.h"
#include "train/plan_run.h"
#include "train/rank_group.h"
#include "train/run_planner.h"
#include "train/update_step.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "timing.h"

namespace {

using namespace headroom;
using headroom::benchmark::median;
using headroom::benchmark::now;

// One of two plans that differ in where weights, gradients and state are.
class EitherPlan : public WindowPlans {
 public:
  explicit EitherPlan(const RunPlan& paged) : paged_(paged), resident_(paged) {
    resident_.paging = PagingPlan();
  }

  void choose(bool is_paged) { is_paged_ = is_paged; }

  void begin_window(const Window&) override {}
  const RunPlan& plan() const override { return is_paged_ ? paged_ : resident_; }
  bool serves(const MicroBatch&, bool) override { return true; }
  const Shapes& window_shapes() const override { return shapes_; }
  void replace(const ShareReport& agreed, const Window&) override {
    throw Error(ExitCode::kInternal, "another plan is needed: " + agreed.reason);
  }

 private:
  RunPlan paged_, resident_;
  Shapes shapes_;
  bool is_paged_ = true;
};

TrainingArguments arguments_for(char** words) {
  TrainingArguments arguments;
  arguments.spill_dir = words[0];
  arguments.output_dir = std::string(words[0]) + "/headroom_paging_benchmark";
  arguments.model = words[3];
  arguments.global_batch_size = std::atoll(words[4]);
  arguments.memory_budget_bytes = parse_bytes(words[5]);
  arguments.max_steps = 1000;
  return arguments;
}

// It never exists whole in memory.
ZooModel make_on_disk(const TrainingArguments& arguments, const std::string& config) {
  const OwnerScope owner(Owner::kWeights);
  const MappedAllocationScope on_disk(std::make_shared<SpillStore>(arguments.spill_dir));
  return make_model(arguments.model, config);
}

void print_plan(const RunPlan& plan) {
  fmt::print(
      "plan: {} x {} samples, peak {} of {}, {:.2f} s per update; reads {}, writes {}, the "
      "disk works {:.2f} s, computing waits {:.2f} s\n",
      plan.num_micro_batches(), plan.micro_batch(), format_bytes(plan.predicted_peak_bytes()),
      format_bytes(plan.budget_bytes), plan.predicted_step_seconds,
      format_bytes(plan.paging.bytes_read), format_bytes(plan.paging.bytes_written),
      1e-9 * static_cast<double>(plan.paging.disk_ns),
      1e-9 * static_cast<double>(plan.paging.wait_ns));
  std::fflush(stdout);
}

// Seconds of an update in the middle of a run. Those before, which are not timed, bring weights and
// state to where the plan wants them: an update that the plan puts off is carried out in the next
// one, and makes the state.
double seconds_of(UpdateStep& step, EitherPlan& plans, WindowWalk& windows, bool is_paged,
                  int num_updates) {
  plans.choose(is_paged);
  MemoryMeter::instance().set_cap(0);
  step.prepare();
  if (is_paged) MemoryMeter::instance().set_cap(plans.plan().budget_bytes);
  const int num_untimed = is_paged ? 2 : 1;
  for (int update = 0; update < num_untimed; ++update) step.run(windows.next());
  const double started = now();
  for (int update = 0; update < num_updates; ++update) step.run(windows.next());
  const double seconds = (now() - started) / num_updates;
  step.finish();
  return seconds;
}

void compare(const TrainingArguments& arguments, const std::string& config, int rounds,
             int num_updates) {
  const RunSettings settings(arguments, 1);
  MemoryMeter::instance().set_cap(arguments.memory_budget_bytes);
  seed_everything(1);
  const ZooModel model = make_on_disk(arguments, config);
  const auto data = make_synthetic_tokens(4 * arguments.global_batch_size, model.input.length,
                                          model.input.vocabulary, 2);
  StaticPager pager(model.chain, arguments.spill_dir, settings.state_bytes_of_parameter(),
                    has_independent_elements(settings.optimizer.name));
  pager.adopt_least();
  const RankGroup ranks(nullptr);
  RunPlanner planner(settings, model.chain, *data, ranks, &pager);
  const RunPlan plan = planner.preview();
  print_plan(plan);
  if (!plan.paging.is_active()) throw ConfigError("this budget needs no paging: give less");
  EitherPlan plans(plan);
  UpdateStep step(settings, model.chain, *data, plans, ranks, {}, &pager);
  WindowWalk windows(settings.grouping(*data));
  std::vector<double> paged, resident, ratios;
  for (int round = 0; round < rounds; ++round) {
    paged.push_back(seconds_of(step, plans, windows, true, num_updates));
    resident.push_back(seconds_of(step, plans, windows, false, num_updates));
    ratios.push_back(paged.back() / resident.back());
    fmt::print("paged {:.2f} s per update, in memory {:.2f} s: {:.3f}x\n", paged.back(),
               resident.back(), ratios.back());
    std::fflush(stdout);
  }
  fmt::print("medians: paged {:.2f} s, in memory {:.2f} s, ratio {:.3f}x\n", median(paged),
             median(resident), median(ratios));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7 && argc != 8) {
    fmt::print(stderr, "usage: {} FOLDER ROUNDS UPDATES MODEL GLOBAL_BATCH BUDGET [MODEL_CONFIG]\n",
               argv[0]);
    return 2;
  }
  try {
    configure_threads(0);
    compare(arguments_for(argv + 1), argc == 8 ? argv[7] : "", std::atoi(argv[2]),
            std::atoi(argv[3]));
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.exit_code());
  }
  return 0;
}
