// Tokenizers against Hugging Face's own library, whose answers are in tokenizers/cases.json.
#include <headroom/data/tokenizer.h>

#include <headroom/core/error.h>

#include "data/tokenizer_parts.h"
#include "support/build_paths.h"
#include "support/idx_files.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <random>
#include <thread>

namespace headroom {
namespace {

using nlohmann::json;
using testing::read_file;
using testing::TemporaryFolder;

std::string fixture(const std::string& name) {
  return std::string(HEADROOM_SOURCE_DIR) + "/tests/data/tokenizers/" + name + ".json";
}

json read_json(const std::string& name) { return json::parse(read_file(fixture(name))); }

void write(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

std::string random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

const char* const kNames[] = {"gpt2", "llama3",     "qwen2", "prefixed",
                              "bert", "bert_cased", "llama2"};

class TokenizerTest : public ::testing::Test {
 protected:
  // A tokenizer.json with one part changed.
  std::string changed(const std::string& name, const std::string& pointer,
                      const json& value) const {
    json root = read_json(name);
    root[json::json_pointer(pointer)] = value;
    write(folder_ / "changed.json", root.dump());
    return folder_ / "changed.json";
  }

  std::string message_of(const std::string& path) const {
    try {
      open_tokenizer(path);
    } catch (const DataError& error) {
      return error.what();
    }
    return "";
  }

  TemporaryFolder folder_;
};

TEST_F(TokenizerTest, GivesTheTokensOfHuggingFace) {
  const json cases = read_json("cases");
  for (const std::string name : kNames) {
    const auto tokenizer = open_tokenizer(fixture(name));
    ASSERT_EQ(cases[name].size(), cases["texts"].size());
    for (std::size_t i = 0; i < cases["texts"].size(); ++i) {
      const auto text = cases["texts"][i].get<std::string>();
      const auto expected = cases[name][i]["ids"].get<std::vector<std::int64_t>>();
      const std::vector<std::int64_t> tokens = tokenizer->encode(text);
      EXPECT_EQ(tokens, expected) << name << ": " << text;
      EXPECT_EQ(tokenizer->with_special_tokens(tokens),
                cases[name][i]["with_special_tokens"].get<std::vector<std::int64_t>>())
          << name << ": " << text;
      EXPECT_EQ(tokenizer->decode(tokens), cases[name][i]["decoded"].get<std::string>())
          << name << ": " << text;
    }
  }
}

TEST_F(TokenizerTest, AnyBytesComeBack) {
  for (const std::string name : {"gpt2", "llama3", "llama2"}) {
    const auto tokenizer = open_tokenizer(fixture(name));
    for (unsigned seed = 0; seed < 20; ++seed) {
      const std::string bytes = random_bytes(1000, seed);
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(bytes)), bytes) << name;
    }
    // Truncated, overlong and surrogate forms, and a text that ends within a character.
    const std::string odd = "a\xc3 \xe2\x82 \xc0\xaf \xed\xa0\x80 \xf5\x80\x80\x80 \xf0\x9f\x91";
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(odd)), odd) << name;
  }
}

TEST_F(TokenizerTest, NormalizingKeepsBytesThatAreNoText) {
  for (const std::string name : {"qwen2", "prefixed", "bert"}) {
    const auto tokenizer = open_tokenizer(fixture(name));
    for (unsigned seed = 0; seed < 20; ++seed) {
      for (const std::int64_t token : tokenizer->encode(random_bytes(1000, seed)))
        ASSERT_LT(token, tokenizer->vocabulary());
    }
  }
  const auto tokenizer = open_tokenizer(fixture("qwen2"));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("e\u0301\xff\xccx")), "\u00e9\xff\xccx");
}

// The pair whose merge is first, again and again, as the definition has it.
std::vector<std::int64_t> merge_by_definition(const std::string& word, const json& model) {
  std::vector<std::string> symbols;
  for (const char byte : word) symbols.push_back(piece_of_byte(static_cast<unsigned char>(byte)));
  while (true) {
    std::size_t best_rank = model["merges"].size(), best = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = std::find(model["merges"].begin(), model["merges"].end(),
                                   symbols[i] + " " + symbols[i + 1]);
      const auto rank = static_cast<std::size_t>(found - model["merges"].begin());
      if (rank < best_rank) best_rank = rank, best = i;
    }
    if (best_rank == model["merges"].size()) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  std::vector<std::int64_t> tokens;
  for (const std::string& symbol : symbols)
    tokens.push_back(model["vocab"][symbol].get<std::int64_t>());
  return tokens;
}

TEST_F(TokenizerTest, WordsOfAnyLengthAreMergedAsDefined) {
  const json model = read_json("gpt2")["model"];
  const auto tokenizer = open_tokenizer(fixture("gpt2"));
  std::mt19937 random(7);
  for (std::size_t length = 2; length < 60; ++length) {
    std::string word;
    for (std::size_t i = 0; i < length; ++i) word.push_back("themodlakpsnvui"[random() % 15]);
    EXPECT_EQ(tokenizer->encode(word), merge_by_definition(word, model)) << word;
  }
}

TEST_F(TokenizerTest, LongWordsAreMergedInOneGo) {
  const auto tokenizer = open_tokenizer(fixture("gpt2"));
  for (const std::string part : {"the", "ab", " ", "\n ", "e\u0301\u0323"}) {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += part;
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
  std::string marks = "a";  // in the wrong order, all on one letter
  for (int i = 0; i < 100000; ++i) marks += "\u0301\u0323";
  EXPECT_GT(open_tokenizer(fixture("qwen2"))->encode(marks).size(), 100000U);
  EXPECT_EQ(open_tokenizer(fixture("bert"))->encode(marks).size(), 1U);
}

TEST_F(TokenizerTest, ThreadsMayShareATokenizer) {
  const auto tokenizer = open_tokenizer(fixture("gpt2"));
  const std::string text = read_json("cases")["texts"][0].get<std::string>();
  const auto expected = tokenizer->encode(text);
  std::vector<std::vector<std::int64_t>> found(4);
  std::vector<std::thread> threads;
  for (auto& tokens : found) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) tokens = tokenizer->encode(text);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& tokens : found) EXPECT_EQ(tokens, expected);
}

TEST_F(TokenizerTest, ReadsVocabularyAndMerges) {
  const json model = read_json("gpt2")["model"];
  std::string merges = "#version: 0.2\n";
  for (const json& merge : model["merges"]) merges += merge.get<std::string>() + "\n";
  json vocabulary = model["vocab"];
  const auto end = static_cast<std::int64_t>(vocabulary.size());
  vocabulary["<|endoftext|>"] = end;
  write(folder_ / "vocab.json", vocabulary.dump());
  write(folder_ / "merges.txt", merges);
  const auto tokenizer = open_tokenizer(folder_.path());
  const auto reference = open_tokenizer(fixture("gpt2"));
  const json cases = read_json("cases");
  for (const json& text : cases["texts"]) {
    if (text.get<std::string>().find("<|end|>") != std::string::npos) continue;
    EXPECT_EQ(tokenizer->encode(text.get<std::string>()),
              reference->encode(text.get<std::string>()));
  }
  EXPECT_EQ(tokenizer->encode("a<|endoftext|>").back(), end);
  EXPECT_EQ(tokenizer->special_tokens().end, end);
  EXPECT_EQ(tokenizer->vocabulary(), end + 1);
}

TEST_F(TokenizerTest, ReadsAListOfWords) {
  const json model = read_json("bert")["model"];
  std::vector<std::string> lines(model["vocab"].size());
  for (const auto& [piece, id] : model["vocab"].items()) lines[id.get<std::size_t>()] = piece;
  std::string content;
  for (const std::string& line : lines) content += line + "\r\n";
  write(folder_ / "vocab.txt", content);
  const json cases = read_json("cases");
  for (const bool lower : {true, false}) {
    write(folder_ / "tokenizer_config.json", lower ? "{}" : R"({"do_lower_case": false})");
    const auto tokenizer = open_tokenizer(folder_.path());
    const auto reference = open_tokenizer(fixture(lower ? "bert" : "bert_cased"));
    for (const json& text : cases["texts"]) {
      const auto tokens = tokenizer->encode(text.get<std::string>());
      EXPECT_EQ(tokens, reference->encode(text.get<std::string>()));
      EXPECT_EQ(tokenizer->with_special_tokens(tokens, tokens),
                reference->with_special_tokens(tokens, tokens));
    }
    EXPECT_EQ(tokenizer->special_tokens().mask, 4);
    EXPECT_EQ(tokenizer->special_tokens().summary, 2);
  }
}

TEST_F(TokenizerTest, TheConfigurationNamesSpecialTokens) {
  write(folder_ / "tokenizer.json", read_file(fixture("llama3")));
  EXPECT_FALSE(open_tokenizer(folder_.path())->special_tokens().end);
  write(folder_ / "tokenizer_config.json",
        R"({"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "pad_token": null})");
  const auto tokenizer = open_tokenizer(folder_.path());
  EXPECT_EQ(tokenizer->special_tokens().end, tokenizer->encode("<|end|>").at(0));
  EXPECT_EQ(tokenizer->special_tokens().begin, tokenizer->with_special_tokens({}).at(0));
  EXPECT_FALSE(tokenizer->special_tokens().padding);
}

TEST_F(TokenizerTest, ASavedTokenizerIsTheSame) {
  const json texts = read_json("cases")["texts"];
  for (const std::string name : kNames) {
    const auto tokenizer = open_tokenizer(fixture(name));
    tokenizer->save(folder_.path());
    EXPECT_TRUE(has_tokenizer(folder_.path()));
    tokenizer->save(folder_.path());
    const auto again = open_tokenizer(folder_.path());
    again->save(folder_.path());  // over its own files
    for (const json& text : texts) {
      EXPECT_EQ(again->encode(text.get<std::string>()), tokenizer->encode(text.get<std::string>()));
    }
  }
  EXPECT_THROW(make_byte_tokenizer()->save(folder_ / "missing"), DataError);
}

TEST_F(TokenizerTest, BytesAreSavedAsAByteLevelVocabulary) {
  EXPECT_FALSE(has_tokenizer(folder_.path()));
  make_byte_tokenizer()->save(folder_.path());
  const auto tokenizer = open_tokenizer(folder_.path());
  const std::string bytes = random_bytes(3000, 1);
  EXPECT_EQ(tokenizer->vocabulary(), 256);
  EXPECT_EQ(tokenizer->encode(bytes), make_byte_tokenizer()->encode(bytes));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(bytes)), bytes);
}

TEST_F(TokenizerTest, NamesWhatItDoesNotKnow) {
  const json pattern = {{"type", "Split"},
                        {"pattern", {{"Regex", "x+y"}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
  EXPECT_NE(message_of(changed("gpt2", "/pre_tokenizer", pattern)).find("x+y"), std::string::npos);
  for (const char* part : {"/pre_tokenizer/type", "/model/type", "/post_processor/type"}) {
    EXPECT_NE(message_of(changed("gpt2", part, "Strange")).find("'Strange'"), std::string::npos)
        << part;
  }
  EXPECT_NE(message_of(changed("qwen2", "/normalizer/type", "Strange")).find("'Strange'"),
            std::string::npos);
  EXPECT_NE(message_of(changed("gpt2", "/model/end_of_word_suffix", "</w>")).find("end_of_word"),
            std::string::npos);
  EXPECT_NE(message_of(folder_.path()).find("tokenizer.json"), std::string::npos);
}

TEST_F(TokenizerTest, RefusesFilesThatDoNotHoldTogether) {
  for (const auto& [part, value] :
       std::vector<std::pair<std::string, json>>{{"/model/vocab/the", -1},
                                                 {"/model/vocab/the", 1.5},
                                                 {"/model/vocab/the", "1"},
                                                 {"/model/vocab/the", 2000000000},
                                                 {"/model/vocab/the", std::int64_t{1} << 40},
                                                 {"/model/vocab", json::array()},
                                                 {"/model/merges/0", "a"},
                                                 {"/model/merges/0", "not there"},
                                                 {"/model/merges/0", {"a", "b", "c"}},
                                                 {"/model/merges", 7},
                                                 {"/model", nullptr},
                                                 {"/added_tokens/0/id", -3},
                                                 {"/added_tokens/0/id", 1 << 30},
                                                 {"/added_tokens/0/content", 3},
                                                 {"/pre_tokenizer", "ByteLevel"}}) {
    EXPECT_NE(message_of(changed("gpt2", part, value)), "") << part << " " << value;
  }
  EXPECT_NE(message_of(changed("bert", "/model/unk_token", "[NONE]")), "");
  EXPECT_NE(message_of(changed("bert", "/post_processor/special_tokens/[CLS]/ids/0", 9999)), "");
  const std::string whole = read_file(fixture("gpt2"));
  for (std::size_t size = 0; size + 2 < whole.size(); size += 97) {
    write(folder_ / "cut.json", whole.substr(0, size));
    EXPECT_NE(message_of(folder_ / "cut.json"), "") << size;
  }
  EXPECT_NE(message_of(folder_ / "missing.json"), "");
  EXPECT_NE(message_of("/dev/zero.json"), "");
}

}  // namespace
}  // namespace headroom
