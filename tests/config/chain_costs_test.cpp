#include <headroom/config/chain_costs.h>

#include <headroom/core/error.h>

#include "support/message_of.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace headroom {
namespace {

const char* const kGood = R"({
  "stages": [
    {"name": "embed", "output_bytes": 4096, "grad_bytes": 4096, "forward_ns": 10, "forward_transient_bytes": 7, "param_grad_bytes": 64,
     "options": [{"kept_bytes": 5000, "forward_ns": 11, "backward_ns": 22, "forward_transient_bytes": 3, "backward_transient_bytes": 4},
                 {"kept_bytes": 4096, "backward_ns": 30}]},
    {"output_bytes": 1e3, "options": [{}]}],
  "input_grad_bytes": 12,
  "boundary_formats": [{"name": "bf16", "size_ratio": 0.5, "encode_ns_per_byte": 0.25, "decode_ns_per_byte": 0.125}, {"name": "disk"}]})";

std::string chain_message(const std::string& text) {
  return testing::message_of<ConfigError>([&] { parse_chain_text(text); });
}

TEST(ChainCosts, ReadsEveryField) {
  const ChainCosts chain = parse_chain_text(kGood);
  ASSERT_EQ(chain.stages.size(), 2u);
  const StageCosts& first = chain.stages[0];
  EXPECT_EQ(first.name, "embed");
  EXPECT_EQ(first.output_bytes, 4096);
  EXPECT_EQ(first.grad_bytes, 4096);
  EXPECT_EQ(first.forward_ns, 10);
  EXPECT_EQ(first.forward_transient_bytes, 7);
  EXPECT_EQ(first.param_grad_bytes, 64);
  ASSERT_EQ(first.options.size(), 2u);
  EXPECT_EQ(first.options[0].kept_bytes, 5000);
  EXPECT_EQ(first.options[0].forward_ns, 11);
  EXPECT_EQ(first.options[0].backward_ns, 22);
  EXPECT_EQ(first.options[0].forward_transient_bytes, 3);
  EXPECT_EQ(first.options[0].backward_transient_bytes, 4);
  EXPECT_EQ(first.options[1].forward_ns, 0);
  EXPECT_EQ(chain.stages[1].name, "stage 2");
  EXPECT_EQ(chain.stages[1].output_bytes, 1000);
  EXPECT_EQ(chain.input_grad_bytes, 12);
  ASSERT_EQ(chain.boundary_formats.size(), 2u);
  EXPECT_EQ(chain.boundary_formats[0].stored_bytes(5), 3);
  EXPECT_EQ(chain.boundary_formats[0].encode_ns(8, 1000), 2);
  EXPECT_EQ(chain.boundary_formats[0].decode_ns(8), 1);
  EXPECT_EQ(chain.boundary_formats[1].stored_bytes(1000), 0);
}

TEST(ChainCosts, WhatIsEncodedBesideAForwardCostsOnlyWhatItTakesLonger) {
  const BoundaryFormat format{"disk", 0.0, 2.0, 1.0, 0.5};
  EXPECT_EQ(format.encode_ns(100, 100), 150);
  EXPECT_EQ(format.encode_ns(100, 1000), 0);
  EXPECT_EQ(format.decode_ns(100), 100);
}

TEST(ChainCosts, WholeProductsAreNotRoundedUp) {
  EXPECT_EQ((BoundaryFormat{"f", 0.1, 0, 0}.stored_bytes(30)), 3);
  EXPECT_EQ((BoundaryFormat{"f", 0.1, 0, 0}.stored_bytes(31)), 4);
  EXPECT_EQ((BoundaryFormat{"f", 0.5, 0, 0}.stored_bytes(kMaxChainBytes)), kMaxChainBytes / 2);
}

TEST(ChainCosts, NamesWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not JSON"},
      {"{\"stages\": [", "not JSON"},
      {"[]", "must be an object"},
      {"{}", "no stages"},
      {R"({"stages": []})", "no stages"},
      {R"({"stages": {}})", "must be a list"},
      {R"({"stages": [{}]})", "has no options"},
      {R"({"stages": [{"options": []}]})", "has no options"},
      {R"({"stages": [{"output_byte": 1, "options": [{}]}]})", "did you mean 'output_bytes'"},
      {R"({"stages": [{"options": [{"keep_bytes": 1}]}]})", "did you mean 'kept_bytes'"},
      {R"({"stage": []})", "did you mean 'stages'"},
      {R"({"stages": [{"output_bytes": -1, "options": [{}]}]})",
       "stages[0]: output_bytes is -1, but must not be negative"},
      {R"({"stages": [{"output_bytes": 1.5, "options": [{}]}]})", "whole number"},
      {R"({"stages": [{"output_bytes": 1125899906842625, "options": [{}]}]})", "above the limit"},
      {R"({"stages": [{"output_bytes": 99999999999999999999999, "options": [{}]}]})",
       "above the limit"},
      {R"({"stages": [{"output_bytes": 1e999, "options": [{}]}]})", "not JSON"},
      {R"({"stages": [{"output_bytes": "12", "options": [{}]}]})", "must be a number"},
      {R"({"stages": [{"name": 5, "options": [{}]}]})", "must be a string"},
      {R"({"stages": [{"options": [{}]}], "boundary_formats": [{"size_ratio": 0.5}]})",
       "has no name"},
      {R"({"stages": [{"options": [{}]}], "boundary_formats": [{"name": "full"}]})",
       "cannot be defined"},
      {R"({"stages": [{"options": [{}]}], "boundary_formats": [{"name": "a"}, {"name": "a"}]})",
       "defined twice"},
      {R"({"stages": [{"options": [{}]}], "boundary_formats": [{"name": "a", "size_ratio": -0.5}]})",
       "from 0 up"},
      {R"({"stages": [{"output_bytes": 1000000000000, "options": [{}]}], "boundary_formats": [{"name": "a", "size_ratio": 1e9}]})",
       "exceed"},
      {R"({"stages": [{"output_bytes": 1000000000000, "options": [{}]}], "boundary_formats": [{"name": "a", "decode_ns_per_byte": 1e9}]})",
       "longer"},
  };
  for (const auto& [text, expected] : cases)
    EXPECT_NE(chain_message(text).find(expected), std::string::npos)
        << text << " -> " << chain_message(text);
}

TEST(ChainCosts, RefusesSumsThatCannotBeCounted) {
  ChainCosts chain;
  StageCosts stage;
  stage.options.emplace_back();
  chain.stages.assign(static_cast<std::size_t>(kMaxChainStages) + 1, stage);
  EXPECT_THROW(validate(chain), ConfigError);
  chain.stages.pop_back();
  EXPECT_NO_THROW(validate(chain));
  for (StageCosts& each : chain.stages) each.forward_ns = kMaxChainNs;
  EXPECT_THROW(validate(chain), ConfigError);
  for (StageCosts& each : chain.stages) {
    each.forward_ns = 0;
    each.options[0].kept_bytes = kMaxChainBytes;
  }
  EXPECT_THROW(validate(chain), ConfigError);
}

TEST(ChainCosts, FilesThatCannotBeReadAreDataErrors) {
  EXPECT_THROW(read_chain_file("/nonexistent/chain.json"), DataError);
  EXPECT_THROW(read_chain_file("/"), DataError);
  const std::string path = ::testing::TempDir() + "chain_costs_test.json";
  std::ofstream(path) << kGood;
  EXPECT_EQ(read_chain_file(path).stages.size(), 2u);
  std::ofstream(path) << "";
  EXPECT_THROW(read_chain_file(path), ConfigError);
  std::remove(path.c_str());
}

/// Damages a good text in one of several ways.
std::string mutate(std::string text, std::mt19937_64& random) {
  const char* const pieces[] = {"-",       "1e308", "9223372036854775808",
                                "null",    "{}",    "[]",
                                "\"",      "}",     "]",
                                ",",       ":",     "NaN",
                                "\\u0000", "\xff",  "1.5",
                                "true"};
  const int num_edits = 1 + static_cast<int>(random() % 4);
  for (int i = 0; i < num_edits && !text.empty(); ++i) {
    const std::size_t at = random() % text.size();
    switch (random() % 6) {
      case 0:
        text[at] = static_cast<char>(random() % 256);
        break;
      case 1:
        text.erase(at, 1 + random() % 8);
        break;
      case 2:
        text.insert(at, pieces[random() % std::size(pieces)]);
        break;
      case 3:
        text.resize(at);
        break;
      case 4: {
        const std::size_t digit = text.find_first_of("0123456789", at);
        if (digit != std::string::npos)
          text.replace(digit, 1, pieces[random() % std::size(pieces)]);
        break;
      }
      default:
        text.insert(at, text.substr(random() % text.size(), random() % 40));
    }
  }
  return text;
}

TEST(ChainCosts, TenThousandMalformedTextsGiveErrorsNotCrashes) {
  std::mt19937_64 random(1);
  int num_refused = 0;
  for (int i = 0; i < 10000; ++i) {
    try {
      validate(parse_chain_text(mutate(kGood, random)));
    } catch (const ConfigError& error) {
      EXPECT_STRNE(error.what(), "");
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 8000);
  for (const char* piece : {"[", "{\"stages\":", "[{\"stages\":"}) {
    std::string deep;
    for (int i = 0; i < 100000; ++i) deep += piece;
    EXPECT_THROW(parse_chain_text(deep), ConfigError);
  }
}

}  // namespace
}  // namespace headroom
