#include "report/json.h"
#include "core/output_file.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

namespace headroom {
namespace {

namespace fs = std::filesystem;

fs::path fresh_folder(const std::string& name) {
  const fs::path folder =
      fs::temp_directory_path() / ("headroom_" + name + "_" + std::to_string(::getpid()));
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Json, KeepsTheOrderOfKeysAndOverwritesInPlace) {
  Json json = Json::object();
  json.set("zebra", 1).set("apple", true).set("mango", "text");
  json.set("apple", false);
  EXPECT_EQ(json.dump(-1), R"({"zebra":1,"apple":false,"mango":"text"})");
}

TEST(Json, NestsByValue) {
  Json inner = Json::object();
  inner.set("a", 1);
  Json outer = Json::object();
  outer.set("inner", inner);
  inner.set("a", 2);
  Json list = Json::array();
  list.push(outer).push(0.5).push(std::int64_t{7}).push(std::string("x"));
  EXPECT_EQ(list.dump(-1), R"([{"inner":{"a":1}},0.5,7,"x"])");
}

TEST(Json, LargeIntegersAndDoublesComeBackExactly) {
  Json json = Json::object();
  json.set("i", std::numeric_limits<std::int64_t>::max()).set("d", 0.1 + 0.2);
  const auto parsed = nlohmann::json::parse(json.dump());
  EXPECT_EQ(parsed["i"].get<std::int64_t>(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parsed["d"].get<double>(), 0.1 + 0.2);
}

TEST(Json, WhatIsNoNumberIsNull) {
  Json json = Json::object();
  json.set("nan", std::nan("")).set("inf", std::numeric_limits<double>::infinity());
  EXPECT_EQ(json.dump(-1), R"({"nan":null,"inf":null})");
}

TEST(Json, TextThatIsNoUtf8StillGivesValidJson) {
  Json json = Json::object();
  json.set("name", std::string("caf\xe9 \"quoted\"\n"));
  EXPECT_TRUE(nlohmann::json::accept(json.dump()));
}

TEST(WriteFileAtomically, ReplacesTheWholeFileAndLeavesNothingElse) {
  const fs::path folder = fresh_folder("json_test");
  const std::string path = (folder / "results.json").string();
  write_file_atomically(path, std::string(5000, 'a'));
  write_file_atomically(path, "short");
  EXPECT_EQ(read(path), "short");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
  fs::remove_all(folder);
}

TEST(WriteFileAtomically, NamesThePathThatCannotBeWritten) {
  const fs::path folder = fresh_folder("json_test_below");
  write_file_atomically((folder / "file").string(), "x");
  const std::string below = (folder / "file" / "results.json").string();
  try {
    write_file_atomically(below, "y");
    FAIL() << "wrote below a file";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find(below), std::string::npos) << error.what();
  }
  EXPECT_EQ(read(folder / "file"), "x");
  fs::remove_all(folder);
}

TEST(WriteFileAtomically, AFailedReplacementKeepsTheOldAndRemovesTheTemporary) {
  const fs::path folder = fresh_folder("json_test_replace");
  fs::create_directories(folder / "target" /
                         "inside");  // a folder that is not empty cannot be replaced by a file
  EXPECT_THROW(write_file_atomically((folder / "target").string(), "y"), ConfigError);
  EXPECT_TRUE(fs::is_directory(folder / "target" / "inside"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace headroom
