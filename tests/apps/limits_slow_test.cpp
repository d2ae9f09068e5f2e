// --memory_budget auto where the kernel limits memory: chosen, kept, and never ended by the kernel.
#include "apps/program.h"
#include "core/control_groups.h"
#include "support/sanitizer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace headroom::testing {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

// A control group with a limit on memory, of version 1 or 2, for processes that join it. Goes with
// this object.
class MemoryGroup {
 public:
  explicit MemoryGroup(std::int64_t limit_bytes)
      : problem_("no control groups with a memory controller are mounted") {
    std::vector<ControlGroup> groups;
    for_each_own_group("memory", "", [&](const ControlGroup& group) { groups.push_back(group); });
    std::reverse(groups.begin(), groups.end());  // the outermost first: its limits are its own
    for (const ControlGroup& group : groups) {
      if (!problem_.empty()) make_in(group, limit_bytes);
    }
  }
  ~MemoryGroup() { remove(); }
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  /// Why there is none; empty when there is one.
  const std::string& problem() const { return problem_; }
  const std::string& folder() const { return folder_; }
  /// Puts the calling process into it.
  bool join() const { return write("/cgroup.procs", ::getpid()); }
  /// Processes that the kernel ended because of the limit.
  int num_killed() const {
    std::ifstream file(folder_ + (is_version_2_ ? "/memory.events" : "/memory.oom_control"));
    std::string word;
    for (int count = 0; file >> word >> count;) {
      if (word == "oom_kill") return count;
    }
    return -1;
  }

 private:
  void make_in(const ControlGroup& around, std::int64_t limit_bytes) {
    remove();
    const std::string folder = around.folder + "/headroom_test_" + std::to_string(::getpid());
    if (::mkdir(folder.c_str(), 0755) != 0) {
      problem_ = "cannot make " + folder + ": " + std::strerror(errno);
      return;
    }
    folder_ = folder;
    is_version_2_ = around.is_version_2;
    const std::string file = is_version_2_ ? "/memory.max" : "/memory.limit_in_bytes";
    problem_ = write(file, limit_bytes) ? "" : "cannot write " + folder_ + file;
  }
  void remove() {
    if (!folder_.empty()) ::rmdir(folder_.c_str());
    folder_.clear();
  }
  bool write(const std::string& file, std::int64_t value) const {
    std::ofstream stream(folder_ + file);
    stream << value << std::flush;
    return stream.good();
  }

  std::string folder_, problem_;
  bool is_version_2_ = false;
};

class LimitsTest : public ::testing::Test {
 protected:
  // Everything kept takes 182 MiB, and 84 do: the lower the limit, the more has to be given up. The
  // run saves and evaluates, whose memory is limited as well.
  Outcome train(const std::function<void()>& limit) const {
    return Program({"train",
                    "--model",
                    "gpt",
                    "--model_config",
                    "n_layer=4,n_head=4,n_embd=256,block_size=128,vocab_size=2048",
                    "--dataset",
                    "synthetic",
                    "--per_device_train_batch_size",
                    "24",
                    "--max_steps",
                    "2",
                    "--save_steps",
                    "1",
                    "--eval_strategy",
                    "steps",
                    "--memory_budget",
                    "auto",
                    "--output_dir",
                    folder_ / "out",
                    "--disable_tqdm"},
                   folder_, {}, limit)
        .wait();
  }
  // Returns whether it trained: it may also say that too little is left.
  bool expect_trained_or_refused(const Outcome& outcome, std::int64_t limit_bytes,
                                 const std::string& source) const {
    EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 4)
        << outcome.exit_code << " at " << limit_bytes / kMiB << " MiB: " << outcome.err;
    EXPECT_NE(outcome.err.find(source), std::string::npos) << outcome.err;
    if (outcome.exit_code != 0) return false;
    const nlohmann::json results =
        nlohmann::json::parse(read_file(folder_ / "out/train_results.json"));
    EXPECT_LT(results["memory_budget_bytes"], limit_bytes);
    EXPECT_LE(results["peak_memory_bytes"], results["memory_budget_bytes"]);
    std::filesystem::remove_all(folder_ / "out");
    return true;
  }

  TemporaryFolder folder_;
};

TEST_F(LimitsTest, OfARealControlGroupAreKept) {
  if (kHasSanitizer) GTEST_SKIP() << "a sanitizer has memory of its own";
  int num_trained = 0;
  const std::vector<std::int64_t> limits_mib = {160, 240, 280, 300, 320, 360, 400};
  for (const std::int64_t limit_mib : limits_mib) {
    const MemoryGroup group(limit_mib * kMiB);
    if (!group.problem().empty()) GTEST_SKIP() << "NOT TESTED: " << group.problem();
    const Outcome outcome = train([&] {
      if (!group.join()) ::_exit(125);
    });
    ASSERT_NE(outcome.exit_code, 125) << "cannot join " << group.folder();
    EXPECT_EQ(group.num_killed(), 0) << limit_mib;
    // By its name: control groups may be mounted at several places.
    const std::string name = std::filesystem::path(group.folder()).filename();
    if (expect_trained_or_refused(outcome, limit_mib * kMiB, name)) ++num_trained;
  }
  EXPECT_GE(num_trained, 4);
}

TEST_F(LimitsTest, OfAddressesAreKept) {
  if (kHasSanitizer) GTEST_SKIP() << "a sanitizer takes more addresses than the limit";
  int num_trained = 0;
  for (const std::int64_t limit_mib : {1100, 1500, 1650, 1800, 2500}) {
    const Outcome outcome = train([&] {
      const rlim_t bytes = static_cast<rlim_t>(limit_mib * kMiB);
      const rlimit limit{bytes, bytes};
      ::setrlimit(RLIMIT_AS, &limit);
    });
    // In less than the libraries need to start, the program does not come to a budget.
    const bool refused_at_start =
        outcome.exit_code == 4 && outcome.err.find("ulimit -v") != std::string::npos;
    if (!refused_at_start && expect_trained_or_refused(outcome, limit_mib * kMiB, "RLIMIT_AS"))
      ++num_trained;
  }
  EXPECT_GE(num_trained, 2);
}

}  // namespace
}  // namespace headroom::testing
