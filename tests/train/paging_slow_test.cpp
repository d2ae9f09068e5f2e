// Disks that fail anywhere in a paged run: the documented error, and a last snapshot that continues
// to the undisturbed weights.
#include "memory/spill_store.h"
#include "train/paged_runs.h"

#include <headroom/core/error.h>
#include "core/log.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <random>
#include <string>

namespace headroom {
namespace {

namespace fs = std::filesystem;

class DiskFaults : public ::testing::TestWithParam<PagedCase> {
 protected:
  TrainingArguments arguments() const {
    TrainingArguments arguments = arguments_of(GetParam(), budget_, folder_.path());
    arguments.save_steps = 1;
    return arguments;
  }

  // The exit code of a run whose transfers fail from the n-th on; 0: there are not so many.
  int train_failing_from(int place) {
    fs::remove_all(folder_.path());
    PreparedRun run(GetParam().run, arguments());
    num_transfers_ = 0;
    const TransferFaultScope fault([&](TransferKind kind, const Extent&) {
      if (++num_transfers_ < place) return 0;
      return kind == TransferKind::kRead ? EIO : ENOSPC;
    });
    try {
      run.trainer->train();
      return 0;
    } catch (const Error& error) {
      return static_cast<int>(error.exit_code());
    }
  }

  ScratchFolder folder_{"disk_faults"}, undisturbed_{"no_disk_faults"};
  std::int64_t budget_ = 0;
  int num_transfers_ = 0;
};

TEST_P(DiskFaults, AtRandomPlacesLeaveAGoodSnapshotAndNoFile) {
  set_log_quiet(true);
  constexpr int kPlaces = 50;
  budget_ = middle_budget(GetParam(), undisturbed_.path());
  const std::string expected = train(GetParam(), budget_, undisturbed_.path()).weights_sha256;
  ASSERT_EQ(train_failing_from(1 << 30), 0);
  std::mt19937 random(7);
  std::uniform_int_distribution<int> places(1, num_transfers_);
  for (int i = 0; i < kPlaces; ++i) {
    const int place = places(random);
    SCOPED_TRACE("fault at transfer " + std::to_string(place));
    const int code = train_failing_from(place);
    if (code == 0) {  // times decide a plan, and so the number of its transfers
      EXPECT_LT(num_transfers_, place);
      continue;
    }
    EXPECT_TRUE(code == static_cast<int>(ExitCode::kData) ||
                code == static_cast<int>(ExitCode::kBudget))
        << code;
    for (const auto& entry : fs::directory_iterator(folder_.path()))
      EXPECT_EQ(entry.path().string().find("spill"), std::string::npos) << entry.path();
    TrainingArguments again = arguments();
    bool has_snapshot = false;
    for (const auto& entry : fs::directory_iterator(folder_.path()))
      has_snapshot = has_snapshot || entry.path().filename().string().find("snapshot-") == 0;
    if (has_snapshot) again.resume_from_checkpoint = "last";
    EXPECT_EQ(PreparedRun(GetParam().run, again).trainer->train().weights_sha256, expected);
  }
}

// With clipping, and so an update in the next forward, and without, in backward.
INSTANTIATE_TEST_SUITE_P(Updates, DiskFaults,
                         ::testing::Values(PagedCase{{"mlp", "hidden=128,layers=4", 8, 4, "adamw"},
                                                     1.0},
                                           PagedCase{{"gpt", kPagedGpt, 8, 4, "adamw"}, 0.0}),
                         [](const auto& which) { return which.param.run.model; });

}  // namespace
}  // namespace headroom
