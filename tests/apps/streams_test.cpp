// Standard streams that are closed or full, and outputs that are no files.
#include "apps/program.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

namespace headroom::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> short_run(const TemporaryFolder& folder) {
  return {"train", "--model_config",  "hidden=8", "--dataset",    "synthetic",   "--max_steps",
          "2",     "--logging_steps", "1",        "--output_dir", folder / "out"};
}

TEST(StandardStreams, WhatIsMeantForPeopleNeverLandsInAFile) {
  const TemporaryFolder folder;
  const Outcome outcome = Program(short_run(folder), folder, {}, [] {
                            ::close(STDIN_FILENO);
                            ::close(STDERR_FILENO);
                          }).wait();
  EXPECT_EQ(outcome.exit_code, 0);
  for (const auto& entry : fs::recursive_directory_iterator(folder / "out")) {
    if (!entry.is_regular_file()) continue;
    EXPECT_EQ(read_file(entry.path()).find("samples/s"), std::string::npos) << entry.path();
  }
}

TEST(StandardStreams, OutputThatIsLostIsAnError) {
  const TemporaryFolder folder;
  const auto to = [&](const std::vector<std::string>& words, const char* device) {
    return Program(words, folder, {},
                   [device] {
                     ::close(STDOUT_FILENO);
                     if (device != nullptr && ::open(device, O_WRONLY) != STDOUT_FILENO)
                       ::_exit(126);
                   })
        .wait();
  };
  std::vector<std::vector<std::string>> commands(3);
  commands[0] = {"info"};
  commands[1] = {"--help"};
  commands[2] = {"estimate", "--model", "mlp", "--json"};
  commands.push_back(short_run(folder));
  for (const std::vector<std::string>& words : commands) {
    for (const char* device : {static_cast<const char*>(nullptr), "/dev/full"}) {
      const Outcome outcome = to(words, device);
      EXPECT_EQ(outcome.exit_code, 2) << words.front();
      EXPECT_NE(outcome.err.find("standard output cannot be written"), std::string::npos)
          << outcome.err;
    }
  }
  EXPECT_TRUE(fs::exists(folder / "out/train_results.json")) << "the run itself is not lost";
  EXPECT_EQ(to({"info"}, "/dev/null").exit_code, 0);
}

TEST(StandardStreams, AReaderThatGoesAwayDoesNotEndARun) {
  const TemporaryFolder folder;
  const Outcome outcome = Program(short_run(folder), folder, {}, [] {
                            int ends[2];
                            if (::pipe(ends) != 0) ::_exit(126);
                            ::dup2(ends[1], STDOUT_FILENO);
                            ::dup2(ends[1], STDERR_FILENO);
                            ::close(ends[0]);
                            ::close(ends[1]);
                          }).wait();
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(fs::exists(folder / "out/train_results.json"));
}

TEST(Outputs, ADeviceIsWrittenToAndNotReplaced) {
  const TemporaryFolder folder;
  ASSERT_EQ(run_program(short_run(folder), folder).exit_code, 0);
  fs::create_symlink("/dev/null", folder / "null");
  EXPECT_EQ(run_program({"report", folder / "out", "--output", folder / "null"}, folder).exit_code,
            0);
  EXPECT_TRUE(fs::is_symlink(folder / "null"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ(run_program({"report", folder / "out", "--output", folder / "out"}, folder).exit_code,
            2);
}

}  // namespace
}  // namespace headroom::testing
