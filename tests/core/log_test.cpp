#include "core/log.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace headroom {
namespace {

template <typename Action>
std::vector<std::string> lines_of(Action action) {
  ::testing::internal::CaptureStderr();
  action();
  std::istringstream text(::testing::internal::GetCapturedStderr());
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

TEST(Log, WritesOneLineEachToStandardError) {
  const auto lines = lines_of([] {
    log_info("made {} of it");  // braces are text, not a format
    log_warning("too warm");
  });
  EXPECT_EQ(lines, (std::vector<std::string>{"made {} of it", "warning: too warm"}));
}

TEST(Log, WarnsOncePerKey) {
  const auto lines = lines_of([] {
    for (int i = 0; i < 3; ++i) log_warning_once("log_test.first", "first");
    log_warning_once("log_test.second", "second");
  });
  EXPECT_EQ(lines, (std::vector<std::string>{"warning: first", "warning: second"}));
}

TEST(Log, QuietSilencesInformationButNoWarning) {
  const auto lines = lines_of([] {
    set_log_quiet(true);
    log_info("not seen");
    log_warning("seen");
    set_log_quiet(false);
    log_info("seen again");
  });
  EXPECT_EQ(lines, (std::vector<std::string>{"warning: seen", "seen again"}));
}

TEST(Log, LinesOfSeveralThreadsStayWhole) {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  const std::string text(120, 'z');
  const auto lines = lines_of([&] {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < kLines; ++i) log_info(text);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  EXPECT_EQ(lines, std::vector<std::string>(kThreads * kLines, text));
}

}  // namespace
}  // namespace headroom
