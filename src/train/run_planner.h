#pragma once

// The plans of a run: one for each size of window and each bucket of shapes. Nothing else plans.

#include <headroom/core/micro_batch.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/train/run_plan.h>

#include "execute/static_pager.h"

#include "train/plan_run.h"
#include "train/profile_book.h"
#include "train/rank_group.h"
#include "train/run_settings.h"
#include "train/shape_bucket.h"
#include "train/snapshot.h"
#include "train/window_plans.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// Something about plans that people are told while a run trains.
struct PlanNews {
  std::string message;  ///< may be empty
  bool is_warning = false;
  std::string name;  ///< of the plan, where it shall be written: "24_24"
};

class RunPlanner final : public WindowPlans {
 public:
  using Tell = std::function<void(const PlanNews&, const RunPlan&)>;

  /// Everything given must outlive the planner.
  RunPlanner(const RunSettings& settings, const Chain& chain, const Dataset& data,
             const RankGroup& ranks, StaticPager* pager = nullptr);

  /// Called when a plan is made after the first one. Empty: nobody listens.
  void on_plan(Tell tell) { tell_ = std::move(tell); }

  /// Plans, before the first update, each size of window that occurs from where `saved` stands. A
  /// run that goes on keeps the splits that it had, because another would change the order of
  /// sums. Throws BudgetError when nothing fits and Stopped. Collective.
  void start(const TrainingPosition& saved);
  /// The plan of a run that starts, with what half and double the budget would give. Leaves nothing
  /// behind on disk, and talks to no other rank.
  RunPlan preview();

  void begin_window(const Window& window) override;
  const RunPlan& plan() const override { return plan_; }
  bool serves(const MicroBatch& micro, bool is_first) override;
  const Shapes& window_shapes() const override { return window_shapes_; }
  void replace(const ShareReport& agreed, const Window& window) override;

  /// The micro-batches of the plans, for a snapshot; nothing before start().
  void describe_splits(TrainingPosition& position) const;

  std::int64_t predicted_peak_bytes() const;  ///< the largest of all plans
  /// Of all plans; before there is one, what the arguments say.
  std::int64_t smallest_micro_batch() const;
  std::int64_t num_plans() const { return num_plans_; }
  std::int64_t num_recoveries() const { return num_recoveries_; }

 private:
  struct Bucket {
    Shapes largest;                         // seen so far, which the plans are made for
    std::vector<std::int64_t> samples;      // some with such shapes, to measure with
    std::map<std::int64_t, RunPlan> plans;  // by samples of a full window
    std::shared_ptr<ProfileBook> book;      // of these shapes; on rank 0, once it planned
  };

  // Starts the buckets with the shapes of the first sample that will be trained.
  void look_at_first_window(std::int64_t num_updates);
  RunPlanRequest request(std::int64_t window_samples) const;
  ProfileBook& book();                           // of the bucket in use
  std::optional<std::int64_t> measure_update();  // nothing where memory ran out
  MicroBatch probe_batch(const std::string& bucket, std::int64_t num_samples) const;
  // "24_24": of the bucket, and of the window where that is not the usual one. A file may have it.
  std::string plan_name(std::int64_t window_samples) const;
  RunPlan plan_with_any_split(RunPlanRequest request);
  RunPlan make_plan_for(std::int64_t window_samples, std::int64_t slack_bytes = 0);
  void use(RunPlan made, std::int64_t window_samples);
  void replan_for_shapes(const ShareReport& agreed, std::int64_t window_samples);
  void replan_for_cap(const ShareReport& agreed, const Window& window);

  const RunSettings& settings_;
  const Chain& chain_;
  const Dataset& data_;
  const RankGroup& ranks_;
  StaticPager* const pager_;  // null: nothing may be paged
  Tell tell_;

  // With a budget there is a bucket for each range of shapes; without one, a single one for all.
  std::map<std::string, Bucket> buckets_;
  std::string bucket_;        // of the plan in use
  std::string first_bucket_;  // that the run was planned for at its start
  bool tracks_shapes_ = false;
  bool keeps_profiles_ = true;  // in the output folder, for the next run
  RunPlan plan_;
  Shapes window_shapes_;
  std::map<std::string, std::int64_t> splits_;  // micro-batches to keep, by name of the plan
  std::int64_t saved_micro_batch_ = 0;          // the same without buckets; 0: none

  std::int64_t budget_bytes_ = 0;  // the smallest cap of all ranks, as they last agreed
  std::string policy_;
  std::optional<std::int64_t> update_ns_;  // that clipping and an update take, where measured
  bool is_training_ = false;               // the optimizer has its state
  std::int64_t num_plans_ = 0;
  std::int64_t num_recoveries_ = 0;
  std::int64_t num_recoveries_here_ = 0;  // at the window in progress
};

}  // namespace headroom
