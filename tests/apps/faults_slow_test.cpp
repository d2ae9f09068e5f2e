// Runs that are killed at random moments, and ranks that are killed or stopped: what was saved is
// enough to end with the weights of a run that nothing happened to.
//
// HEADROOM_TEST_SCALE makes the loops so many times longer: 25 is what docs/reliability.md reports.
#include "apps/program.h"
#include "support/flipped_bit.h"
#include "support/scale.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <deque>
#include <random>
#include <thread>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

class Faults : public ::testing::Test {
 protected:
  std::vector<std::string> train(const std::string& output, int num_ranks, int max_steps = 60,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"train",
                                      "--model_config",
                                      sizes_,
                                      "--dataset",
                                      "synthetic",
                                      "--global_batch_size",
                                      "32",
                                      "--max_steps",
                                      std::to_string(max_steps),
                                      "--save_steps",
                                      "1",
                                      "--save_total_limit",
                                      "2",
                                      "--logging_steps",
                                      "10",
                                      "--lr_scheduler_type",
                                      "constant",  // so that a longer run begins as a shorter one
                                      "--disable_tqdm",
                                      "--nproc_per_node",
                                      std::to_string(num_ranks),
                                      "--output_dir",
                                      folder_ / output};
    if (std::find(more.begin(), more.end(), "--ddp_timeout") == more.end())
      words.insert(words.end(), {"--ddp_timeout", "30"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  std::string hash_of(const std::string& output) const {
    return nlohmann::json::parse(
        read_file(folder_ / (output + "/train_results.json")))["weights_sha256"];
  }

  bool has_snapshot(const std::string& output) const {
    if (!fs::exists(folder_ / output)) return false;
    for (const auto& entry : fs::directory_iterator(folder_ / output)) {
      if (entry.path().filename().string().rfind("snapshot-", 0) == 0) return true;
    }
    return false;
  }

  // Whether a run that was killed has left a snapshot that it was writing, exchanging or removing.
  bool is_half_saved(const std::string& output) const {
    if (!fs::exists(folder_ / output)) return false;
    for (const auto& entry : fs::directory_iterator(folder_ / output)) {
      if (entry.path().filename().string().rfind(".snapshot-", 0) == 0) return true;
    }
    return false;
  }

  // Kills runs at random moments and resumes them, until one has ended by itself. Returns how many
  // were killed.
  int kill_until_done(const std::string& output, int num_ranks, int most) {
    int num_killed = 0;
    for (int try_number = 0; try_number < most + 200; ++try_number) {
      std::vector<std::string> words = train(output, num_ranks);
      if (has_snapshot(output)) words.insert(words.end(), {"--resume_from_checkpoint", "last"});
      const Program program(words, folder_);
      if (num_killed < most) {
        const auto until =
            std::chrono::steady_clock::now() + whole_time_ * (5 + random_() % 90) / 100;
        program.interrupt_when(SIGKILL, [&] { return std::chrono::steady_clock::now() > until; });
      }
      const Outcome outcome = program.wait();
      if (outcome.exit_code == -SIGKILL) {
        ++num_killed;
        num_killed_in_saving_ += is_half_saved(output) ? 1 : 0;
        continue;
      }
      // Ranks whose starter was killed write a last snapshot: until then the folder is theirs.
      if (outcome.err.find("another run") != std::string::npos) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        continue;
      }
      EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
      return num_killed;
    }
    ADD_FAILURE() << "the folder of a killed run stays locked";
    return num_killed;
  }

  // The run that nobody disturbs, which says when others may be killed.
  void run_whole(const std::string& output, int num_ranks) {
    const auto start = std::chrono::steady_clock::now();
    ASSERT_EQ(run_program(train(output, num_ranks), folder_).exit_code, 0);
    whole_time_ = std::chrono::steady_clock::now() - start;
  }

  // Sends a signal to one of two ranks, at a random moment after the first snapshot.
  void hit_a_rank(const Program& program, const std::string& output, int signal) {
    const int rank = static_cast<int>(random_() % 2);
    const auto delay = std::chrono::milliseconds(random_() % 150);
    pid_t process = -1;
    program.interrupt_when(0, [&] {
      process = has_snapshot(output) ? rank_process(rank, folder_ / output) : -1;
      return process > 0;
    });
    std::this_thread::sleep_for(delay);
    if (process > 0) ::kill(process, signal);
  }

  // What a run that could not write has left must be enough to end as if nothing had happened.
  void expect_undisturbed_end(const std::string& output, int max_steps) {
    for (const auto& entry : fs::directory_iterator(folder_ / output))
      EXPECT_EQ(entry.path().filename().string().find(".snapshot"), std::string::npos)
          << entry.path() << " is left over";
    const Outcome outcome =
        run_program(train(output, 1, max_steps, {"--resume_from_checkpoint", "last"}), folder_);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(hash_of(output), hash_of("whole"));
  }

  TemporaryFolder folder_;
  std::string sizes_ = "hidden=64";
  std::mt19937_64 random_{20240601};
  int num_killed_in_saving_ = 0;
  std::chrono::steady_clock::duration whole_time_{};
};

TEST_F(Faults, KilledRunsEndWithTheWeightsOfUndisturbedOnes) {
  run_whole("whole", 1);
  int num_killed = 0;
  for (int run = 0; num_killed < scaled(6) && run < scaled(6); ++run) {
    const std::string output = "killed" + std::to_string(run);
    num_killed += kill_until_done(output, 1, 6);
    EXPECT_EQ(hash_of(output), hash_of("whole"));
    for (const auto& entry : fs::directory_iterator(folder_ / output))
      EXPECT_EQ(entry.path().filename().string().rfind(".snapshot", 0), std::string::npos)
          << entry.path() << " is left over";
  }
  EXPECT_GE(num_killed, 1);
  RecordProperty("kills", num_killed);
  RecordProperty("kills_in_saving", num_killed_in_saving_);
}

TEST_F(Faults, KilledLaunchersAndTheirRanksToo) {
  run_whole("whole", 2);
  int num_killed = 0;
  for (int run = 0; num_killed < scaled(2) && run < scaled(2); ++run) {
    const std::string output = "killed" + std::to_string(run);
    num_killed += kill_until_done(output, 2, std::min(6, scaled(2) - num_killed));
    EXPECT_EQ(hash_of(output), hash_of("whole"));
  }
  EXPECT_GE(num_killed, 1);
  RecordProperty("kills", num_killed);
  RecordProperty("kills_in_saving", num_killed_in_saving_);
}

// A rank that is killed, and one that only stands still: the others end with 6, the starter ends
// them all, and the run goes on from what rank 0 has saved.
TEST_F(Faults, KilledAndStoppedRanksEndTheOthersAndLoseNothing) {
  constexpr int kSteps = 150;
  ASSERT_EQ(run_program(train("whole", 2, kSteps), folder_).exit_code, 0);
  int num_hit = 0;
  for (int pair = 0; pair < scaled(1); ++pair) {
    std::deque<Program> programs;
    std::vector<std::string> outputs;
    for (const int signal : {SIGKILL, SIGSTOP}) {
      outputs.push_back("rank" + std::to_string(signal) + "-" + std::to_string(pair));
      const std::string& output = outputs.back();
      programs.emplace_back(train(output, 2, kSteps, {"--ddp_timeout", "3"}), folder_);
      hit_a_rank(programs.back(), output, signal);
    }
    for (std::size_t i = 0; i < programs.size(); ++i) {
      const Outcome outcome = programs[i].wait();
      EXPECT_TRUE(outcome.exit_code == 6 || outcome.exit_code == 0) << outcome.err;
      num_hit += outcome.exit_code == 6 ? 1 : 0;
      EXPECT_EQ(rank_process(0, folder_ / outputs[i]), -1) << "a rank is left over";
      EXPECT_EQ(rank_process(1, folder_ / outputs[i]), -1) << "a rank is left over";
      if (outcome.exit_code == 6) {
        // Nothing happens to this one, and the machine may stand still for a while.
        const Outcome resumed =
            run_program(train(outputs[i], 2, kSteps,
                              {"--resume_from_checkpoint", "last", "--ddp_timeout", "600"}),
                        folder_);
        ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
      }
      EXPECT_EQ(hash_of(outputs[i]), hash_of("whole"));
    }
  }
  EXPECT_GE(num_hit, scaled(1));
  RecordProperty("hit", num_hit);
}

TEST_F(Faults, EveryFlippedBitOfASnapshotIsExitFive) {
  ASSERT_EQ(run_program(train("out", 1, 3), folder_).exit_code, 0);
  const std::string snapshot = folder_ / "out/snapshot-3";
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(snapshot)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (int i = 0; i < scaled(20); ++i) {
    const std::string& path = files[static_cast<std::size_t>(i) % files.size()];
    const std::string whole = read_file(path);
    const std::size_t bit = random_() % (8 * whole.size());
    write_plain(path, with_flipped_bit(whole, bit));
    const Outcome outcome =
        run_program(train("other", 1, 5, {"--resume_from_checkpoint", snapshot}), folder_);
    EXPECT_EQ(outcome.exit_code, 5) << path << " bit " << bit << ": " << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    write_plain(path, whole);
  }
  EXPECT_EQ(
      run_program(train("other", 1, 5, {"--resume_from_checkpoint", snapshot}), folder_).exit_code,
      0);
  RecordProperty("flips", scaled(20));
}

TEST_F(Faults, TwoRunsInOneFolderAreRefused) {
  const Program first(train("out", 1, 100000), folder_);
  ASSERT_TRUE(first.interrupt_when(0, [&] { return has_snapshot("out"); }));
  const Outcome second = run_program(train("out", 1), folder_);
  EXPECT_EQ(second.exit_code, 2);
  EXPECT_NE(second.err.find(std::to_string(first.process())), std::string::npos) << second.err;
  ::kill(first.process(), SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 130);
}

// A disk that takes no file above some size: exit 0 with a warning, or the code of the file that
// could not be written, and never without the snapshots that were there. Each size is between those
// of two files of a run, in turn.
TEST_F(Faults, AFullDiskLosesNoSnapshot) {
  ASSERT_EQ(run_program(train("whole", 1, 6), folder_).exit_code, 0);
  ASSERT_EQ(run_program(train("out", 1, 3), folder_).exit_code, 0);
  std::vector<rlim_t> sizes = {0};
  for (const auto& entry : fs::recursive_directory_iterator(folder_ / "out")) {
    if (entry.is_regular_file()) sizes.push_back(entry.file_size());
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  fs::copy(folder_ / "out", folder_ / "start", fs::copy_options::recursive);
  for (int i = 0; i < scaled(3); ++i) {
    fs::remove_all(folder_ / "out");
    fs::copy(folder_ / "start", folder_ / "out", fs::copy_options::recursive);
    // The largest first: it is the one that a short run of this test shall not miss.
    const std::size_t range = sizes.size() - 1 - static_cast<std::size_t>(i) % (sizes.size() - 1);
    const rlim_t size = sizes[range - 1] + random_() % (sizes[range] - sizes[range - 1]);
    const Outcome outcome =
        Program(train("out", 1, 6, {"--resume_from_checkpoint", "last"}), folder_, {}, [size] {
          const rlimit limit{size, size};
          std::signal(SIGXFSZ, SIG_IGN);
          ::setrlimit(RLIMIT_FSIZE, &limit);
        }).wait();
    EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 2 || outcome.exit_code == 5)
        << size << ": " << outcome.exit_code << " " << outcome.err;
    expect_undisturbed_end("out", 6);
  }
  RecordProperty("runs", scaled(3));
}

// The same on a filesystem that has room for so many pages more: at a scale of 10 each page that a
// run writes is the one that is missing, once.
TEST_F(Faults, AFullFilesystemLosesNoSnapshot) {
  constexpr int kPages = 20;  // more than a run takes
  sizes_ = "hidden=2";
  ASSERT_EQ(run_program(train("whole", 1, 6), folder_).exit_code, 0);
  ASSERT_EQ(run_program(train("start", 1, 3), folder_).exit_code, 0);
  fs::create_directory(folder_ / "disk");
  bool is_mounted = false;
  const int num_runs = std::min(kPages, scaled(2));
  int num_full = 0;
  const auto fill_and_train = [&] {
    const std::string disk = folder_ / "disk", ballast = disk + "/ballast";
    if (::unshare(CLONE_FS | CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=4m") != 0)
      return;
    is_mounted = true;
    for (int i = 0; i < num_runs; ++i) {
      const auto room = static_cast<std::uintmax_t>(4096 * (kPages * i / num_runs));
      fs::remove_all(disk + "/out");
      fs::copy(folder_ / "start", disk + "/out", fs::copy_options::recursive);
      write_plain(ballast, std::string(fs::space(disk).available - room, 'x'));
      const Outcome outcome =
          run_program(train("disk/out", 1, 6, {"--resume_from_checkpoint", "last"}), folder_);
      EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 2 || outcome.exit_code == 5)
          << room << ": " << outcome.exit_code << " " << outcome.err;
      const bool is_full = outcome.err.find("No space left on device") != std::string::npos;
      EXPECT_TRUE(is_full || outcome.exit_code == 0) << outcome.err;
      num_full += is_full ? 1 : 0;
      fs::remove(ballast);
      expect_undisturbed_end("disk/out", 6);
    }
  };
  std::thread(fill_and_train).join();  // which alone sees the filesystem
  if (!is_mounted) GTEST_SKIP() << "this user may not mount a filesystem";
  EXPECT_GE(num_full, 1);
  EXPECT_LT(num_full, kPages);
  RecordProperty("runs", num_runs);
  RecordProperty("full", num_full);
}

}  // namespace
}  // namespace headroom::testing
