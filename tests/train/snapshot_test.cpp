// Snapshots: there whole or not at all, found again, and refused when one bit is not as it was.
#include "train/snapshot.h"
#include "core/hash.h"
#include "train/position_text.h"
#include "train/run_lock.h"
#include "train/snapshot_folder.h"
#include "train/training_support.h"

#include "support/flipped_bit.h"

#include <headroom/core/error.h>
#include <headroom/model/pretrained.h>
#include <headroom/model/safetensors.h>
#include <headroom/optim/optimizer.h>
#include <headroom/train/trainer.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

const std::map<std::string, std::string> kSettings = {{"dataset", "two\nlines = 100%"},
                                                      {"seed", "7"}};

TrainingPosition position_at(std::int64_t step) {
  TrainingPosition position;
  position.global_step = step;
  position.micro_batch = 4;
  position.micro_batch_by_shape = {{"a b", 2}, {"c%\n", 3}};
  position.loss_sum = 0.1;
  position.num_skipped_updates = 1;
  const at::Tensor state = cpu_random_state();
  position.random_states = {
      std::string(static_cast<const char*>(state.data_ptr()), state.nbytes())};
  position.settings = kSettings;
  return position;
}

class SnapshotTest : public ::testing::Test {
 protected:
  explicit SnapshotTest(const std::string& optimizer = "adamw") {
    OptimizerConfig config;
    config.name = optimizer;
    optimizer_ = make_optimizer(config, chain_.named_parameters());
    optimizer_->prepare_state();
  }

  std::string save(std::int64_t step, std::int64_t limit = 0) {
    return save_snapshot(folder_.path(), chain_, *optimizer_, position_at(step), limit);
  }
  TrainingPosition load(const std::string& folder) {
    return load_snapshot(folder, chain_, *optimizer_, kSettings);
  }
  std::string last() const { return fs::path(last_snapshot(folder_.path())).filename(); }
  std::set<std::string> names() const {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder_.path()))
      result.insert(entry.path().filename());
    return result;
  }

  TemporaryFolder folder_;
  Chain chain_ = chain_of(make_noisy_network(3));
  std::unique_ptr<LeanOptimizer> optimizer_;
};

TEST_F(SnapshotTest, GivesBackWhatWasSaved) {
  const std::string hash = weights_sha256(chain_);
  const std::string folder = save(5);
  for (at::Tensor& parameter : chain_.parameters()) parameter.detach().zero_();
  const TrainingPosition position = load(folder);
  EXPECT_EQ(weights_sha256(chain_), hash);
  EXPECT_EQ(position_text(position), position_text(position_at(5)));
  EXPECT_EQ(position.settings, kSettings) << "a line break in a path is part of it";
}

TEST_F(SnapshotTest, HoldsTheWeightsInTheFormOfASavedModel) {
  const std::string hash = weights_sha256(chain_);
  const std::string folder = save(5);
  for (at::Tensor& parameter : chain_.parameters()) parameter.detach().zero_();
  load_weights(chain_, folder);
  EXPECT_EQ(weights_sha256(chain_), hash);

  for (const auto& [model, config] : {std::pair{"gpt", "n_layer=2,n_head=2,n_embd=8,block_size=8"},
                                      std::pair{"nin", "width=8"}}) {
    chain_ = make_model(model, config).chain;
    const std::string saved = save(6);
    const std::string before = weights_sha256(chain_);
    EXPECT_EQ(weights_sha256(load_pretrained(saved).chain), before) << model;
    for (at::Tensor& parameter : chain_.parameters()) parameter.detach().zero_();
    load(saved);
    EXPECT_EQ(weights_sha256(chain_), before) << model;
  }
}

TEST_F(SnapshotTest, OfAModelThatIsTrainedInPartHoldsThatPart) {
  chain_ = make_model("gpt", "n_layer=2,n_head=2,n_embd=8,block_size=8").chain;
  for (auto& [name, parameter] : chain_.named_parameters()) {
    if (name.rfind("block1.", 0) != 0) parameter.set_requires_grad(false);
  }
  const std::string folder = save(5), hash = weights_sha256(chain_);
  EXPECT_FALSE(fs::exists(folder + "/config.json"));
  for (const auto& [name, tensor] : load_safetensors(folder))
    EXPECT_EQ(name.rfind("block1.", 0), 0U);
  for (at::Tensor& parameter : chain_.parameters()) parameter.detach().zero_();
  load(folder);
  EXPECT_EQ(weights_sha256(chain_), hash);
}

TEST_F(SnapshotTest, TheOneJustWrittenIsNeverTheOneThatIsRemoved) {
  save(100);
  save(200);
  save(3, 1);
  EXPECT_EQ(names(), std::set<std::string>{"snapshot-3"});
  EXPECT_EQ(last(), "snapshot-3");
  save(4, 2);
  save(2, 2);
  EXPECT_EQ(names(), (std::set<std::string>{"snapshot-2", "snapshot-4"}));
}

TEST_F(SnapshotTest, WritingTheSameNumberAgainNeverLeavesNone) {
  save(5);
  const std::string list = folder_ / "snapshot-5/checksums.sha256";
  const std::string aside = folder_ / ".snapshot-5.aside/checksums.sha256";
  std::atomic<bool> done{false};
  std::atomic<int> num_missing{0};
  std::thread watcher([&] {
    while (!done) num_missing += fs::exists(list) || fs::exists(aside) || fs::exists(list) ? 0 : 1;
  });
  for (int i = 0; i < 30; ++i) save(5);
  done = true;
  watcher.join();
  EXPECT_EQ(num_missing, 0);
  EXPECT_EQ(names(), std::set<std::string>{"snapshot-5"});
  load(folder_ / "snapshot-5");
}

TEST_F(SnapshotTest, WhatAKilledRunHasLeftIsClearedAtTheNextStart) {
  save(5);
  save(6);
  fs::create_directories(folder_ / ".snapshot-7.tmp/half");
  fs::rename(folder_ / "snapshot-6", folder_ / ".snapshot-6.aside");
  { const RunLock lock(folder_.path()); }
  EXPECT_EQ(names(), (std::set<std::string>{"snapshot-5", "snapshot-6"}));
  fs::create_directories(folder_ / ".snapshot-6.aside/old");
  { const RunLock lock(folder_.path()); }
  EXPECT_EQ(names(), (std::set<std::string>{"snapshot-5", "snapshot-6"}));
  load(folder_ / "snapshot-6");
}

TEST_F(SnapshotTest, LastSkipsWhatIsNotWhole) {
  save(5);
  save(6);
  fs::create_directories(folder_ / "snapshot-900");
  EXPECT_EQ(last(), "snapshot-6") << "an empty folder is none";
  fs::remove(folder_ / "snapshot-6/optimizer.pt");
  EXPECT_EQ(last(), "snapshot-5") << "half-deleted";
  save(7);
  std::string bytes = read_file(folder_ / "snapshot-7/model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_plain(folder_ / "snapshot-7/model.safetensors", bytes);
  EXPECT_EQ(last(), "snapshot-5") << "a flipped bit";
  write_plain(folder_ / "snapshot-5/checksums.sha256", "");
  EXPECT_THROW(last(), SnapshotError);
  EXPECT_THROW(last_snapshot(folder_ / "absent"), SnapshotError);
}

TEST_F(SnapshotTest, AnOldOneThatCannotBeRemovedIsNoError) {
  save(1);
  fs::create_directories(folder_ / ".snapshot-1.tmp/in the way");
  EXPECT_EQ(fs::path(save(2, 1)).filename(), "snapshot-2");
  EXPECT_TRUE(fs::exists(folder_ / "snapshot-1"));
}

TEST_F(SnapshotTest, EveryFlippedBitIsFound) {
  const std::string folder = save(5);
  const std::string hash = weights_sha256(chain_);
  std::mt19937_64 random(1);
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  ASSERT_EQ(files.size(), 4U);
  for (int i = 0; i < 500; ++i) {
    const std::string& path = files[static_cast<std::size_t>(i) % files.size()];
    const std::string whole = read_file(path);
    const std::size_t bit = random() % (8 * whole.size());
    write_plain(path, with_flipped_bit(whole, bit));
    EXPECT_THROW(load(folder), SnapshotError) << path << " bit " << bit;
    write_plain(path, whole);
  }
  EXPECT_EQ(weights_sha256(chain_), hash) << "nothing is changed by a snapshot that is refused";
  load(folder);
}

TEST_F(SnapshotTest, EveryCutFileIsFound) {
  const std::string folder = save(5);
  for (const char* name :
       {"model.safetensors", "optimizer.pt", "position.txt", "checksums.sha256"}) {
    const std::string path = folder + "/" + name, whole = read_file(path);
    for (std::size_t size = 0; size < whole.size(); size += 1 + whole.size() / 7) {
      write_plain(path, whole.substr(0, size));
      EXPECT_THROW(load(folder), SnapshotError) << name << " cut to " << size;
    }
    fs::remove(path);
    fs::create_directory(path);
    EXPECT_THROW(load(folder), SnapshotError) << name << " is a folder";
    fs::remove(path);
    fs::create_symlink("/dev/zero", path);
    EXPECT_THROW(load(folder), SnapshotError) << name << " is a device";
    fs::remove(path);
    write_plain(path, "");
    fs::resize_file(path, std::uintmax_t{1} << 40);  // takes no disk; reading it would take hours
    EXPECT_THROW(load(folder), SnapshotError) << name << " is absurdly large";
    fs::remove(path);
    EXPECT_THROW(load(folder), SnapshotError) << name << " is missing";
    write_plain(path, whole);
  }
}

// Somebody made it with the right sums: still no error but SnapshotError.
TEST_F(SnapshotTest, WrongContentsWithRightSumsAreRefused) {
  const std::string folder = save(5);
  const auto refused = [&](const std::string& name, const std::string& bytes) {
    const std::string path = folder + "/" + name, whole = read_file(path);
    const SnapshotList before = read_snapshot_list(folder);
    SnapshotList list = before;
    Sha256 hash;
    hash.update(bytes.data(), bytes.size());
    list.files[name] = {hash.hex_digest(), static_cast<std::int64_t>(bytes.size())};
    write_plain(path, bytes);
    write_snapshot_list(folder, list);
    try {
      load(folder);
      ADD_FAILURE() << name << " was taken";
    } catch (const SnapshotError& error) {
      EXPECT_GT(std::string(error.what()).size(), folder.size() + 10) << "an empty message";
    }
    write_plain(path, whole);
    write_snapshot_list(folder, before);
  };
  refused("optimizer.pt", "");
  refused("optimizer.pt", "no archive");
  refused("model.safetensors", "{}");
  refused("model.safetensors", read_file(folder + "/model.safetensors") + "more");
  const auto changed_weights = [&](const auto& change) {
    auto tensors = load_safetensors(folder);
    change(tensors);
    save_safetensors(folder_ / "changed", {tensors.begin(), tensors.end()});
    return read_file(folder_ / "changed");
  };
  using Tensors = std::map<std::string, at::Tensor>;
  refused("model.safetensors", changed_weights([](Tensors& all) { all.erase(all.begin()); }));
  refused("model.safetensors", changed_weights([](Tensors& all) { all["x"] = torch::ones(2); }));
  refused("model.safetensors", changed_weights([](Tensors& all) {
            all.begin()->second = all.begin()->second.unsqueeze(0).contiguous();
          }));
  refused("model.safetensors", changed_weights([](Tensors& all) {
            all.begin()->second = all.begin()->second.to(torch::kHalf);
          }));
  const std::string text = read_file(folder + "/position.txt");
  for (const char* field :
       {"global_step", "micro_batch", "loss_sum", "num_skipped_updates", "loss_scale",
        "loss_scale_growth_tracker", "loss_scale_num_skipped", "num_ranks", "random_state"}) {
    const std::size_t start = text.find(std::string("\n") + field + " ") + 1;
    const std::size_t begin = text.rfind(field, 0) == 0 ? 0 : start;
    const std::size_t end = text.find('\n', begin) + 1;
    refused("position.txt", text.substr(0, begin) + text.substr(end));
    refused("position.txt", text.substr(0, begin) + field + " x\n" + text.substr(end));
    if (std::string(field) == "loss_sum") continue;  // which may be negative
    refused("position.txt", text.substr(0, begin) + field + " -1\n" + text.substr(end));
  }
  refused("position.txt", text + "num_ranks 1\n");
  const std::size_t state = text.find("random_state 0 ") + 15;
  refused("position.txt", text.substr(0, state) + "00" + text.substr(text.find('\n', state)));
  load(folder);
}

// At every size up to that of the largest file, as a full disk would.
class FullDiskTest : public SnapshotTest {
 protected:
  explicit FullDiskTest(const std::string& optimizer = "adamw") : SnapshotTest(optimizer) {}
  void TearDown() override {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  void SetUp() override {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }

  void expect_the_last_good_one_to_stay() {
    const std::string good = save(5);
    std::uintmax_t largest = 0;
    for (const auto& entry : fs::directory_iterator(good))
      largest = std::max(largest, entry.file_size());
    for (std::uintmax_t size = 0; size < largest; size += 1 + largest / 40) {
      const rlimit limit{size, before_.rlim_max};
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
      EXPECT_THROW(save(6), SnapshotError) << "no file above " << size << " bytes";
      EXPECT_THROW(save(5), SnapshotError) << "in the place of the good one";
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before_), 0);
      EXPECT_EQ(names(), std::set<std::string>{"snapshot-5"}) << size;
    }
    load(good);
    save(6);
  }

  rlimit before_{};
  void (*handler_)(int) = SIG_DFL;
};

TEST_F(FullDiskTest, KeepsTheLastGoodSnapshotWhereTheOptimizerIsLargest) {
  expect_the_last_good_one_to_stay();
}

class FullDiskWithoutStateTest : public FullDiskTest {
 protected:
  FullDiskWithoutStateTest() : FullDiskTest("sgd") {}
};
TEST_F(FullDiskWithoutStateTest, KeepsTheLastGoodSnapshotWhereThePositionIsLargest) {
  expect_the_last_good_one_to_stay();
}

// A filesystem that has room for so many pages more: each page of each file is the one that is
// missing, once.
TEST_F(SnapshotTest, AFullFilesystemKeepsTheLastGoodSnapshot) {
  bool is_mounted = false;
  const auto fill_and_save = [&] {
    const std::string place = folder_.path();
    if (::unshare(CLONE_FS | CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", place.c_str(), "tmpfs", 0, "size=1m") != 0)
      return;
    is_mounted = true;
    const std::string good = save(5), ballast = folder_ / "ballast";
    std::uintmax_t num_pages = 0;
    for (bool is_full = true; is_full && num_pages < 200; ++num_pages) {
      fs::remove(ballast);
      write_plain(ballast, std::string(fs::space(place).available - 4096 * num_pages, 'x'));
      try {
        save(6);
        is_full = false;
      } catch (const SnapshotError&) {
        EXPECT_EQ(names(), (std::set<std::string>{"ballast", "snapshot-5"})) << num_pages;
        load(good);
      }
    }
    EXPECT_GT(num_pages, 6U) << "every file takes a page";
    EXPECT_EQ(last(), "snapshot-6");
  };
  std::thread(fill_and_save).join();  // which alone sees the filesystem
  if (!is_mounted) GTEST_SKIP() << "this user may not mount a filesystem";
}

TEST(PositionText, KeepsNumbersThatAreNotFinite) {
  TrainingPosition position = position_at(9);
  position.loss_sum = std::nan("");
  EXPECT_TRUE(std::isnan(parse_position(position_text(position), "here").loss_sum));
  position.loss_sum = 1.0 / 3.0;
  EXPECT_EQ(parse_position(position_text(position), "here").loss_sum, 1.0 / 3.0);
}

TEST(RunLock, TheSecondRunInAFolderIsRefusedWithTheProcessOfTheFirst) {
  const TemporaryFolder folder;
  {
    const RunLock lock(folder.path());
    try {
      const RunLock second(folder.path());
      ADD_FAILURE() << "two runs in one folder";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("process " + std::to_string(::getpid())),
                std::string::npos)
          << error.what();
    }
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
  write_plain(folder / ".run.lock", "99999999");  // of a run that was killed
  const RunLock lock(folder.path());
}

}  // namespace
}  // namespace headroom::testing
