#include "train/rank_group.h"

#include <headroom/core/random.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/rank_threads.h"
#include "train/stop.h"
#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

// A group needs a communicator that it shares; the threads' own is lent to it.
RankGroup group_of(Communicator& comm) {
  return RankGroup(std::shared_ptr<Communicator>(std::shared_ptr<void>(), &comm));
}

// What each of two ranks throws when rank 0 plans like this.
std::vector<std::exception_ptr> errors_of_planning(const std::function<RunPlan()>& make) {
  return run_ranks(2, [&](Communicator& comm) { group_of(comm).plan_together(make); });
}

TEST(RankGroup, OneRankIsAGroupLikeAnyOther) {
  const RankGroup group(nullptr);
  EXPECT_TRUE(group.is_first());
  EXPECT_EQ(group.size(), 1);
  EXPECT_FALSE(group.any(false));
  EXPECT_TRUE(group.any(true));
  EXPECT_EQ(group.gather(7), std::vector<int>{7});
  EXPECT_EQ(group.from_first([] { return std::string("text"); }), "text");
}

TEST(RankGroup, AllUseWhatRankZeroPlanned) {
  std::vector<std::int64_t> found(2);
  const auto errors = run_ranks(2, [&](Communicator& comm) {
    const RunPlan plan = group_of(comm).plan_together([&] {
      EXPECT_EQ(comm.rank(), 0);
      RunPlan made;
      made.batch.micro_batches = {{5, 1, {}}};
      return made;
    });
    found[static_cast<std::size_t>(comm.rank())] = plan.micro_batch();
  });
  EXPECT_FALSE(errors[0] || errors[1]);
  EXPECT_EQ(found, (std::vector<std::int64_t>{5, 5}));
}

TEST(RankGroup, WhatStopsRankZeroFromPlanningReachesAll) {
  auto errors = errors_of_planning([]() -> RunPlan { throw BudgetError("too small"); });
  for (const auto& error : errors) EXPECT_EQ(message_of<BudgetError>(error), "too small");
  errors = errors_of_planning([]() -> RunPlan { throw Stopped(); });
  for (const auto& error : errors) EXPECT_NE(message_of<Stopped>(error), "");
  errors = errors_of_planning([]() -> RunPlan { throw DataError("gone"); });
  EXPECT_EQ(message_of<DataError>(errors[0]), "gone");
  EXPECT_NE(message_of<OtherRankFailed>(errors[1]).find("gone"), std::string::npos);
}

TEST(RankGroup, WhereARankSpillsIsItsOwnAffairButNotWhetherItCan) {
  const auto errors_with = [](const std::string& of_rank_zero, const std::string& of_rank_one) {
    return run_ranks(2, [&](Communicator& comm) {
      TrainingArguments arguments;
      arguments.spill_dir = comm.rank() == 0 ? of_rank_zero : of_rank_one;
      torch::nn::Sequential network(torch::nn::Linear(2, 2));
      const RunSettings settings(arguments, 2);
      group_of(comm).check_alike(settings, chain_of(network), TableData(3, 2, 2, 1));
    });
  };
  for (const auto& error : errors_with("/tmp", "/var/tmp")) EXPECT_FALSE(error);
  for (const auto& error : errors_with("/tmp", ""))
    EXPECT_NE(message_of<ConfigError>(error).find("--spill_dir"), std::string::npos);
}

TEST(RankGroup, RandomStatesComeBackAndNewRanksGetTheirOwn) {
  const RankGroup group(nullptr);
  seed_everything(3);
  const std::vector<std::string> saved = group.random_states();
  const double expected = torch::rand({1}).item<double>();
  group.restore_random_states(saved, 0);
  EXPECT_EQ(torch::rand({1}).item<double>(), expected);
  group.restore_random_states({}, 9);
  const double fresh = torch::rand({1}).item<double>();
  group.restore_random_states({}, 9);
  EXPECT_EQ(torch::rand({1}).item<double>(), fresh);
  EXPECT_NE(fresh, expected);
}

}  // namespace
}  // namespace headroom
