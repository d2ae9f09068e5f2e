#pragma once

// What the program says to bad input: one line on standard error, the documented exit code, and no
// file half-written.

#include "apps/program.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace headroom::testing {

// Every file below a folder with its contents.
inline std::map<std::string, std::string> files_in(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  if (!std::filesystem::exists(folder)) return files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[entry.path().string()] = read_file(entry.path().string());
  }
  return files;
}

struct BadInput {
  std::vector<std::string> arguments;
  int exit_code;
  std::string part;  // of the message
};

class BadInputTest : public ::testing::Test {
 protected:
  // Flags of a run that would be short and good.
  std::vector<std::string> train(const std::vector<std::string>& more,
                                 const std::string& dataset = "synthetic") const {
    std::vector<std::string> words = {"train", "--model_config", "hidden=8",     "--dataset",
                                      dataset, "--output_dir",   folder_ / "out"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  void expect_refused(const BadInput& bad) { expect_refused(std::vector<BadInput>{bad}); }

  void expect_refused(const std::vector<BadInput>& all) {
    const auto before = files_in(folder_.path() / "out");
    constexpr std::size_t kAtOnce = 2;  // loading the program takes most of its time
    std::deque<Program> running;
    for (std::size_t i = 0; i < all.size() + kAtOnce; ++i) {
      if (i < all.size()) running.emplace_back(all[i].arguments, folder_);
      if (i < kAtOnce) continue;
      if (running.empty()) break;
      check(all[i - kAtOnce], running.front().wait());
      running.pop_front();
    }
    EXPECT_EQ(files_in(folder_.path() / "out"), before) << "files were left or changed";
  }

  void check(const BadInput& bad, const Outcome& outcome) {
    ++num_inputs_;
    std::string command;
    for (const std::string& word : bad.arguments) command += " " + word;
    EXPECT_EQ(outcome.exit_code, bad.exit_code) << command << "\n" << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << command << "\n"
                                                                           << outcome.err;
    EXPECT_EQ(outcome.err.rfind("headroom: ", 0), 0U) << command << "\n" << outcome.err;
    EXPECT_NE(outcome.err.find(bad.part), std::string::npos)
        << command << "\nexpected '" << bad.part << "' in: " << outcome.err;
    EXPECT_EQ(outcome.out, "") << command;
  }

  void TearDown() override { RecordProperty("inputs", num_inputs_); }

  TemporaryFolder folder_;
  int num_inputs_ = 0;
};

}  // namespace headroom::testing
