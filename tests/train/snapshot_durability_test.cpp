// What a snapshot brings to the disk, and when: a power cut after the rename must not find names
// without their contents. No test can cut the power, so this program has an fsync of its own that
// records its calls, and fails on request. Those that change names can end the process, and need
// not know how to exchange two folders.
#include "train/snapshot.h"
#include "train/snapshot_folder.h"
#include "train/training_support.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/optim/optimizer.h>
#include <headroom/train/trainer.h>

#include <gtest/gtest.h>

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

/// What was brought to the disk, as it was at that moment.
struct SyncedPath {
  fs::path path;
  ino_t inode = 0;
  off_t num_bytes = 0;
  std::set<std::string> names;  // of a folder
};

SyncedPath synced_path(int descriptor) {
  SyncedPath synced;
  struct stat status {};
  ::fstat(descriptor, &status);
  synced.path = fs::read_symlink("/proc/self/fd/" + std::to_string(descriptor));
  synced.inode = status.st_ino;
  synced.num_bytes = status.st_size;
  if (S_ISDIR(status.st_mode)) synced.names = names_in(synced.path);
  return synced;
}

/// Records the calls of fsync while it lives. The one with the number `failing` fails as a broken
/// disk does.
class SyncRecord {
 public:
  explicit SyncRecord(int failing = -1) : failing_(failing) { current = this; }
  ~SyncRecord() { current = nullptr; }
  SyncRecord(const SyncRecord&) = delete;
  SyncRecord& operator=(const SyncRecord&) = delete;

  bool add(int descriptor) {
    calls_.push_back(synced_path(descriptor));
    return static_cast<int>(calls_.size()) - 1 != failing_;
  }
  const std::vector<SyncedPath>& calls() const { return calls_; }
  bool has_failed() const { return static_cast<int>(calls_.size()) > failing_; }

  static SyncRecord* current;

 private:
  int failing_;
  std::vector<SyncedPath> calls_;
};
SyncRecord* SyncRecord::current = nullptr;

/// What the calls that change names do in this process.
struct NameCalls {
  bool can_exchange = true;  // otherwise as on a file system that cannot
  int num_until_kill = -1;   // calls that still pass; the next one ends the process
};
NameCalls name_calls;
constexpr int kKilled = 99;

void count_name_call() {
  if (name_calls.num_until_kill-- == 0) ::_exit(kKilled);
}

template <class Function>
Function* of_the_system(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

class SnapshotDurability : public ::testing::Test {
 protected:
  SnapshotDurability() {
    optimizer_ = make_optimizer({}, chain_.named_parameters());
    optimizer_->prepare_state();
  }

  fs::path save(std::int64_t step) {
    TrainingPosition position;
    position.global_step = step;
    const at::Tensor state = cpu_random_state();
    position.random_states = {
        std::string(static_cast<const char*>(state.data_ptr()), state.nbytes())};
    return save_snapshot(folder_.path(), chain_, *optimizer_, position, 0);
  }

  // Every byte and every name was on the disk before the folder got its name.
  static void expect_synced_before_the_rename(const fs::path& snapshot,
                                              const std::vector<SyncedPath>& calls) {
    const auto call_of = [&](const fs::path& path) {
      struct stat status {};
      ::stat(path.c_str(), &status);
      return std::find_if(calls.begin(), calls.end(),
                          [&](const SyncedPath& call) { return call.inode == status.st_ino; });
    };
    const auto of_folder = call_of(snapshot);
    ASSERT_NE(of_folder, calls.end()) << "the folder";
    EXPECT_NE(of_folder->path, snapshot) << "renamed before its names were on the disk";
    EXPECT_EQ(of_folder->names, names_in(snapshot));
    for (const auto& entry : fs::directory_iterator(snapshot)) {
      const auto of_file = call_of(entry.path());
      ASSERT_NE(of_file, calls.end()) << entry.path();
      EXPECT_EQ(of_file->path.parent_path(), of_folder->path) << entry.path();
      EXPECT_EQ(of_file->num_bytes, static_cast<off_t>(entry.file_size())) << entry.path();
      EXPECT_LT(of_file, of_folder) << entry.path();
    }
    const auto of_parent = call_of(snapshot.parent_path());
    ASSERT_NE(of_parent, calls.end()) << "the rename itself";
    EXPECT_GT(of_parent, of_folder);
    EXPECT_EQ(of_parent->names.count(snapshot.filename()), 1U);
  }

  TemporaryFolder folder_;
  Chain chain_ = chain_of(make_noisy_network(3));
  std::unique_ptr<LeanOptimizer> optimizer_;
};

TEST_F(SnapshotDurability, EveryFileAndTheFolderAreOnTheDiskBeforeTheRename) {
  const SyncRecord record;
  const fs::path snapshot = save(5);
  ASSERT_GE(names_in(snapshot).size(), 4U);
  expect_synced_before_the_rename(snapshot, record.calls());
}

TEST_F(SnapshotDurability, AnOldOneIsRemovedWhenTheDiskHasTheNewOneInItsPlace) {
  save(5);
  const SyncRecord record;
  const fs::path snapshot = save(5);
  expect_synced_before_the_rename(snapshot, record.calls());
  EXPECT_EQ(record.calls().back().path, folder_.path());
  EXPECT_EQ(record.calls().back().names.size(), 2U) << "the old one is still there";
  EXPECT_EQ(names_in(folder_.path()).size(), 1U);
}

TEST_F(SnapshotDurability, ADiskThatFailsIsAnErrorAndKeepsTheLastGoodSnapshot) {
  const fs::path good = save(5);
  int num_failed = 0;
  for (bool has_failed = true; has_failed; ++num_failed) {
    const SyncRecord record(num_failed);
    try {
      save(6);
      EXPECT_FALSE(record.has_failed()) << "call " << num_failed << " of fsync was ignored";
    } catch (const SnapshotError&) {
      EXPECT_TRUE(record.has_failed());
    }
    has_failed = record.has_failed();
    for (const std::string& name : names_in(folder_.path()))
      EXPECT_NE(name.front(), '.') << name << " is left over";
    load_snapshot(good, chain_, *optimizer_, {});
    fs::remove_all(folder_ / "snapshot-6");
    ASSERT_LT(num_failed, 100);
  }
  EXPECT_GE(num_failed, 6) << "four files and two folders";
}

void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Replaces a snapshot in a process of its own, which ends at the call `num_calls` that changes a
/// name. False where it came to its end before.
bool replace_until_killed(const fs::path& work, const fs::path& snapshot, bool can_exchange,
                          int num_calls) {
  const pid_t child = ::fork();
  if (child == 0) {
    name_calls = {can_exchange, num_calls};
    replace_snapshot(work.string(), snapshot.string());
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  return WEXITSTATUS(status) == kKilled;
}

class ReplacedSnapshot : public ::testing::TestWithParam<bool> {};

TEST_P(ReplacedSnapshot, IsTheOldOneOrTheNewOneWhereverAProcessEnds) {
  std::set<std::string> seen;
  int num_calls = 0;
  for (bool was_killed = true; was_killed; ++num_calls) {
    ASSERT_LT(num_calls, 100);
    const TemporaryFolder folder;
    const fs::path snapshot = snapshot_folder(folder.path(), 5);
    const fs::path work = snapshot_work_folder(folder.path(), 5);
    for (const fs::path& path : {snapshot, work}) fs::create_directory(path);
    write_text(snapshot / "weights", "old");
    write_text(work / "weights", "new");

    was_killed = replace_until_killed(work, snapshot, GetParam(), num_calls);
    if (!was_killed) {
      EXPECT_EQ(read_text(snapshot / "weights"), "new");
    }
    remove_stale_snapshots(folder.path());
    const std::string text = read_text(snapshot / "weights");
    EXPECT_TRUE(text == "old" || text == "new") << "'" << text << "' after call " << num_calls;
    EXPECT_EQ(names_in(folder.path()).size(), 1U) << "after call " << num_calls;
    seen.insert(text);
  }
  EXPECT_EQ(seen.size(), 2U) << "killed on both sides of the change";
  EXPECT_GT(num_calls, GetParam() ? 2 : 3) << "renamed, then removed";
}

INSTANTIATE_TEST_SUITE_P(Exchange, ReplacedSnapshot, ::testing::Bool());

}  // namespace
}  // namespace headroom::testing

// The test program's own, in the place of the C library's.
extern "C" {

int rename(const char* from, const char* to) noexcept {
  headroom::testing::count_name_call();
  static const auto system = headroom::testing::of_the_system<decltype(rename)>("rename");
  return system(from, to);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  headroom::testing::count_name_call();
  if (!headroom::testing::name_calls.can_exchange) {
    errno = EINVAL;
    return -1;
  }
  static const auto system = headroom::testing::of_the_system<decltype(renameat2)>("renameat2");
  return system(from_folder, from, to_folder, to, flags);
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  headroom::testing::count_name_call();
  static const auto system = headroom::testing::of_the_system<decltype(unlinkat)>("unlinkat");
  return system(folder, path, flags);
}

int fsync(int descriptor) {
  using headroom::testing::SyncRecord;
  if (SyncRecord::current != nullptr && !SyncRecord::current->add(descriptor)) {
    errno = EIO;
    return -1;
  }
  static const auto system = headroom::testing::of_the_system<decltype(fsync)>("fsync");
  return system(descriptor);
}

}  // extern "C"
