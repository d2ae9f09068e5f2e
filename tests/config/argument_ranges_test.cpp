#include "config/argument_fields.h"

#include <headroom/core/error.h>

#include "support/refused_values.h"

#include <gtest/gtest.h>

#include <string>

namespace headroom {
namespace {

TEST(ArgumentRanges, EveryFlagRefusesWhatIsOutsideOfItsRangeByName) {
  int num_tried = 0;
  for (const ArgumentField& field : argument_fields()) {
    if (field.range.empty()) continue;
    for (const std::string& value : testing::refused_values(field)) {
      ++num_tried;
      TrainingArguments arguments;
      try {
        field.set(arguments, value);
        field.check(arguments);
        ADD_FAILURE() << "--" << field.name << " took '" << value << "'";
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find(field.name), std::string::npos) << error.what();
      }
    }
  }
  EXPECT_GT(num_tried, 500);
}

}  // namespace
}  // namespace headroom
