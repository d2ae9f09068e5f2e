#include "data/labels.h"
#include "data/table_file.h"

#include <headroom/core/error.h>

#include "support/idx_files.h"

#include <gtest/gtest.h>

namespace headroom {
namespace {

using Texts = std::vector<std::string>;

class TableTest : public ::testing::Test {
 protected:
  Table read(const std::string& name, const std::string& bytes, const Texts& columns = {"text"}) {
    testing::write_plain(folder_ / name, bytes);
    return read_table(folder_ / name, columns, Texts(columns.size(), "text_column"));
  }
  std::string error(const std::string& name, const std::string& bytes,
                    const Texts& columns = {"text", "label"}) {
    try {
      read(name, bytes, columns);
    } catch (const DataError& error) {
      return error.what();
    }
    return "no error";
  }

  testing::TemporaryFolder folder_;
};

TEST_F(TableTest, SeparatedValuesWithQuotesAndLineEnds) {
  const Table table =
      read("a.csv", "\xef\xbb\xbflabel,text\r\n1,plain\r\n2,\"a, \"\"b\"\"\nc\"\r\n\r\n3,\n",
           {"text", "label"});
  EXPECT_EQ(table.columns[0], (Texts{"plain", "a, \"b\"\nc", ""}));
  EXPECT_EQ(table.columns[1], (Texts{"1", "2", "3"}));
  EXPECT_NE(table.place(1).find("a.csv: row 3"), std::string::npos) << table.place(1);
  EXPECT_EQ(read("a.tsv", "text\tlabel\nx, y\t1\n").columns[0], Texts{"x, y"});
}

TEST_F(TableTest, JsonLines) {
  const Table table = read("a.jsonl",
                           "{\"text\": \"a\\nb\", \"label\": 3}\n\n{\"label\": true, \"text\": "
                           "\"\xc3\xa4\"}\r\n",
                           {"text", "label"});
  EXPECT_EQ(table.columns[0], (Texts{"a\nb", "\xc3\xa4"}));
  EXPECT_EQ(table.columns[1], (Texts{"3", "true"}));
  EXPECT_EQ(table.rows, (std::vector<std::int64_t>{1, 3}));
}

TEST_F(TableTest, WhatIsWrongIsNamedWithItsRow) {
  for (const auto& [name, bytes, part] :
       std::vector<std::tuple<std::string, std::string, std::string>>{
           {"a.csv", "", "a.csv: row 1: the file is empty"},
           {"a.csv", "text,class\nx,1\n", "row 1: there is no column 'label' among text, class"},
           {"a.csv", "text,label\nx,1\ny\n", "row 3: 1 fields, but the header names 2"},
           {"a.csv", "text,label\nx,1,2\n", "row 2: 3 fields"},
           {"a.csv", "text,label\n\"x,1\n", "row 2: a quote is opened"},
           {"a.csv", "text,label\n\"x\"y,1\n", "row 2: text follows a closing quote"},
           {"a.csv", "text,label\nx\xff,1\n", "row 2: column 'text' is not UTF-8 at its byte 1"},
           {"a.csv", "text,label\n", "there is no row of data"},
           {"a.jsonl", "{\"text\": \"x\", \"label\": 1}\n{\"text\": \"y\"}\n",
            "row 2: there is no key 'label' among text"},
           {"a.jsonl", "{\"text\": \"x\"\n", "row 1: the line is not a JSON object"},
           {"a.jsonl", "[1]\n", "row 1: the line is not a JSON object"},
           {"a.jsonl", "{\"text\": [1], \"label\": 1}\n", "row 1: 'text' is array"},
           {"a.jsonl", "{\"text\": \"\xff\", \"label\": 1}\n",
            "row 1: column '(line)' is not UTF-8"},
           {"a.jsonl", "\n\n", "there is no row of data"}}) {
    const std::string message = error(name, bytes);
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nexpected " << part;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

LabelMap map(const Texts& labels, const LabelNames& of_model = {}, bool must_be_known = false) {
  return map_labels(labels, of_model, must_be_known,
                    [](const std::string& label) { throw DataError("unknown " + label); });
}

TEST(Labels, AreOrderedByNumberOrName) {
  EXPECT_EQ(map({"b", "a", "b"}).names(), (LabelNames{"a", "b"}));
  EXPECT_EQ(map({"10", "9", "-1"}).names(), (LabelNames{"-1", "9", "10"}));
  EXPECT_EQ(map({"10", "9", "x"}).names(), (LabelNames{"10", "9", "x"}));
}

TEST(Labels, OfTheModelAreTakenWhereTheyIncludeTheData) {
  const LabelNames model = {"neutral", "good", "bad"};
  EXPECT_EQ(map({"bad", "good"}, model).names(), model);
  EXPECT_EQ(map({"bad", "good"}, model).number("bad"), 2);
  EXPECT_EQ(map({"bad", "ugly"}, model).names(), (LabelNames{"bad", "ugly"}));
  EXPECT_THROW(map({"bad", "ugly"}, model, true), DataError);
  const LabelMap numbered = map({"1", "0"}, {"LABEL_0", "LABEL_1", "LABEL_2"}, true);
  EXPECT_EQ(numbered.number("1"), 1);
  EXPECT_THROW(map({"3"}, {"LABEL_0", "LABEL_1", "LABEL_2"}, true), DataError);
}

}  // namespace
}  // namespace headroom
