#include "data/word_cache.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace headroom {
namespace {

// Counts the words that are encoded because they are not in the cache.
struct CountingCache {
  WordCache cache;
  int num_encoded = 0;

  std::vector<std::int32_t> tokens_of(std::int32_t number) {
    return cache.find(std::to_string(number), [&](std::vector<std::int32_t>& tokens) {
      ++num_encoded;
      tokens = {number, number + 1};
    });
  }
};

TEST(WordCache, GivesTheTokensOfEveryWordWhileItGrows) {
  CountingCache words;
  for (const std::int32_t count : {100, 5000, 200000}) {
    for (int round = 0; round < 2; ++round) {
      for (std::int32_t number = 0; number < count; ++number)
        ASSERT_EQ(words.tokens_of(number), (std::vector<std::int32_t>{number, number + 1}));
    }
  }
}

TEST(WordCache, RemembersMostOfTheWordsThatItHasPlacesFor) {
  for (const std::int32_t count : {100, 5000, 20000}) {
    CountingCache words;
    for (std::int32_t number = 0; number < count; ++number) words.tokens_of(number);
    EXPECT_EQ(words.num_encoded, count);
    for (std::int32_t number = 0; number < count; ++number) words.tokens_of(number);
    EXPECT_LT(words.num_encoded, count + count / 2) << count;
  }
}

TEST(WordCache, AWordThatCannotBeEncodedIsNotRemembered) {
  CountingCache words;
  EXPECT_THROW(words.cache.find("7", [](auto&) { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_EQ(words.tokens_of(7), (std::vector<std::int32_t>{7, 8}));
}

}  // namespace
}  // namespace headroom
