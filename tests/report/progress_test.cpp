#include "report/progress.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

ProgressState state_at(std::int64_t step) {
  ProgressState state;
  state.epoch = 0.25;
  state.step = step;
  state.total_steps = 100;
  state.loss = 2.125;
  state.samples_per_second = 1234;
  state.live_bytes = 1 << 20;
  state.peak_bytes = 3 << 20;
  return state;
}

// Standard error of a test is no terminal while it is captured.
TEST(Progress, PrintsPlainLinesOfWhatIsLoggedWhereThereIsNoTerminal) {
  ::testing::internal::CaptureStderr();
  Progress progress(true);
  for (int step = 1; step <= 20; ++step) progress.update(state_at(step));
  progress.log(state_at(20));
  progress.finish();
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_EQ(text.find('\r'), std::string::npos) << "control characters belong to terminals";
  EXPECT_EQ(text.find('\033'), std::string::npos);
  for (const char* part : {"epoch 0.25", "step 20/100", "loss 2.1250", "1234 samples/s", "1.00 MiB",
                           "peak 3.00 MiB", "left "}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in: " << text;
  }
}

TEST(Progress, ASlowRunIsNotZeroSamplesPerSecond) {
  ProgressState slow = state_at(1);
  slow.samples_per_second = 0.0421;
  slow.loss = 0.000123456;
  ::testing::internal::CaptureStderr();
  Progress(true).log(slow);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("  loss 0.000123  0.0421 samples/s"), std::string::npos) << text;
}

TEST(Progress, ShowsNothingWhenOff) {
  ::testing::internal::CaptureStderr();
  {
    Progress progress(false);
    progress.update(state_at(1));
    progress.log(state_at(1));
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(JsonLines, EveryLineIsOneObjectAndIsThereAtOnce) {
  const fs::path path =
      fs::temp_directory_path() / ("headroom_lines_" + std::to_string(::getpid()) + ".jsonl");
  fs::remove(path);
  JsonLines lines(path.string());
  for (int step = 1; step <= 3; ++step) {
    lines.write(Json::object().set("step", step).set("text", "two\nlines"));
    std::ifstream file(path);
    int count = 0;
    for (std::string line; std::getline(file, line);)
      EXPECT_EQ(nlohmann::json::parse(line)["step"], ++count);
    EXPECT_EQ(count, step);
  }
  fs::remove(path);
}

TEST(JsonLines, AnEmptyPathWritesNothing) {
  JsonLines lines("");
  EXPECT_NO_THROW(lines.write(Json::object().set("step", 1)));
}

TEST(JsonLines, NamesTheFileThatCannotBeWritten) {
  try {
    JsonLines lines("/dev/null/metrics.jsonl");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("/dev/null/metrics.jsonl"), std::string::npos);
  }
}

}  // namespace
}  // namespace headroom
