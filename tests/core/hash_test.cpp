#include "core/hash.h"

#include <gtest/gtest.h>

#include <string>

namespace headroom {
namespace {

std::string sha256(const std::string& text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex_digest();
}

TEST(Sha256, MatchesThePublishedExamples) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnHowTheBytesAreHandedOver) {
  const std::string text(1000, 'x');
  Sha256 hash;
  for (std::size_t start = 0; start < text.size(); start += 7)
    hash.update(text.data() + start, std::min<std::size_t>(7, text.size() - start));
  EXPECT_EQ(hash.hex_digest(), sha256(text));
}

}  // namespace
}  // namespace headroom
