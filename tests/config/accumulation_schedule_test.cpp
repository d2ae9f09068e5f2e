#include <headroom/config/accumulation_schedule.h>

#include <headroom/core/error.h>

#include <gtest/gtest.h>

namespace headroom {
namespace {

TEST(AccumulationSchedule, ANumberHoldsForEveryEpoch) {
  const AccumulationSchedule schedule = 8;
  EXPECT_EQ(schedule.steps_at(0), 8);
  EXPECT_EQ(schedule.steps_at(1000), 8);
  EXPECT_EQ(AccumulationSchedule().steps_at(0), 1);
}

TEST(AccumulationSchedule, ChangesAtTheGivenEpochs) {
  const AccumulationSchedule schedule = {{0, 8}, {4, 2}, {10, 3}};
  EXPECT_EQ(schedule.steps_at(0), 8);
  EXPECT_EQ(schedule.steps_at(3), 8);
  EXPECT_EQ(schedule.steps_at(4), 2);
  EXPECT_EQ(schedule.steps_at(9), 2);
  EXPECT_EQ(schedule.steps_at(10), 3);
  EXPECT_EQ(schedule.steps_at(11), 3);
  EXPECT_EQ(schedule.max_steps(), 8);
  EXPECT_THROW(schedule.steps_at(-1), ConfigError);
}

TEST(AccumulationSchedule, OneEntryInBracesIsAScheduleNotACopy) {
  const AccumulationSchedule schedule = {{0, 5}};
  EXPECT_EQ(schedule.steps_at(7), 5);
}

TEST(AccumulationSchedule, ParsesTheCommandLine) {
  EXPECT_EQ(AccumulationSchedule::parse("8").steps_at(3), 8);
  EXPECT_EQ(AccumulationSchedule::parse(" 8 ").steps_at(3), 8);
  const AccumulationSchedule schedule = AccumulationSchedule::parse("0:8, 4:2");
  EXPECT_EQ(schedule.steps_at(3), 8);
  EXPECT_EQ(schedule.steps_at(4), 2);
}

TEST(AccumulationSchedule, PrintsWhatItParses) {
  for (const char* text : {"1", "8", "0:8,4:2", "0:1,1:2,2:4"})
    EXPECT_EQ(AccumulationSchedule::parse(text).to_string(), text);
}

TEST(AccumulationSchedule, RejectsNonsenseAndQuotesIt) {
  for (const char* text : {"",
                           " ",
                           "0",
                           "-3",
                           "eight",
                           "8.5",
                           "8x",
                           "1:8",
                           "4:2,0:8",
                           "0:8,0:2",
                           "0:8,4:0",
                           "0:8,4:-1",
                           "0:8,",
                           ",0:8",
                           "0:8,4",
                           "0:8;4:2",
                           "0:",
                           ":8",
                           "0::8",
                           "0:8:2",
                           "99999999999999999999",
                           "0:99999999999999999999"}) {
    try {
      AccumulationSchedule::parse(text);
      FAIL() << "accepted '" << text << "'";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("'") + text + "'"), std::string::npos)
          << error.what();
    }
  }
}

TEST(AccumulationSchedule, RejectsNonsenseFromCode) {
  EXPECT_THROW(AccumulationSchedule(0), ConfigError);
  EXPECT_THROW(AccumulationSchedule(-1), ConfigError);
  EXPECT_THROW(AccumulationSchedule(std::vector<AccumulationSchedule::Change>{}), ConfigError);
  EXPECT_THROW((AccumulationSchedule{{1, 8}}), ConfigError);
  EXPECT_THROW((AccumulationSchedule{{0, 8}, {4, 2}, {3, 1}}), ConfigError);
}

}  // namespace
}  // namespace headroom
