// Limits of address space (ulimit -v) in which the libraries cannot start: one line and exit 4,
// where OpenBLAS would try for ever and LibTorch would abort.
#include "apps/program.h"
#include "support/sanitizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace headroom::testing {
namespace {

Outcome run_within(rlim_t address_space_bytes, const TemporaryFolder& folder) {
  const Program program({"train", "--model_config", "hidden=8", "--dataset", "synthetic",
                         "--max_steps", "1", "--output_dir", folder / "out"},
                        folder, {}, [=] {
                          const rlimit limit{address_space_bytes, address_space_bytes};
                          ::setrlimit(RLIMIT_AS, &limit);
                        });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(50);
  program.interrupt_when(SIGKILL, [&] { return std::chrono::steady_clock::now() > until; });
  return program.wait();
}

TEST(AddressSpace, ALimitIsRefusedBeforeTheLibrariesStartOrIsEnough) {
  if (kHasSanitizer) GTEST_SKIP() << "a sanitizer takes more addresses than the limit";
  constexpr rlim_t kMiB = rlim_t{1} << 20;
  constexpr int kCannotBeLoaded = 127;  // the system's own refusal: the libraries are larger
  const TemporaryFolder folder;
  std::map<int, int> num_outcomes;
  for (rlim_t size = 384; size <= 1408; size += 128) {
    const Outcome outcome = run_within(size * kMiB, folder);
    ++num_outcomes[outcome.exit_code];
    EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 4 ||
                outcome.exit_code == kCannotBeLoaded)
        << size << " MiB: " << outcome.exit_code << " " << outcome.err;
    if (outcome.exit_code != 4) continue;
    EXPECT_NE(outcome.err.find("ulimit -v"), std::string::npos) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  EXPECT_GE(num_outcomes[4], 1);
  EXPECT_EQ(run_within(4096 * kMiB, folder).exit_code, 0);
}

}  // namespace
}  // namespace headroom::testing
