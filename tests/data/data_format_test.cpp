#include "data/data_format.h"

#include <headroom/core/error.h>

#include "support/idx_files.h"

#include <gtest/gtest.h>

#include <string>

namespace headroom {
namespace {

using Kind = ModelInput::Kind;

class DataFormats : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) const {
    testing::write_plain(folder_ / name, bytes);
    return folder_ / name;
  }

  testing::TemporaryFolder folder_;
};

DataRequest request_for(Kind kind, const std::string& dataset) {
  DataRequest request;
  request.dataset = dataset;
  request.model = "some_model";
  request.input.kind = kind;
  request.input.length = 8;
  request.input.vocabulary = 256;
  return request;
}

std::string what_is(const std::string& dataset) { return format_of(dataset).what; }

TEST_F(DataFormats, AreRecognisedByNameAndFile) {
  EXPECT_EQ(what_is("synthetic"), "is made up");
  EXPECT_EQ(what_is("fashion-mnist"), "holds images");
  EXPECT_EQ(what_is(folder_.path().string()), "holds images");
  EXPECT_EQ(what_is(write("tokens.bin", "abcd")), "holds tokens");
  EXPECT_EQ(what_is(write("poem.txt", "abcd")), "is a text file");
  EXPECT_TRUE(format_of(folder_ / "poem.txt").takes_tokenizer);
  EXPECT_THROW(format_of(folder_ / "absent"), DataError);
}

TEST_F(DataFormats, EveryRowSaysWhatItIs) {
  for (const DataFormat& format : data_formats()) {
    EXPECT_STRNE(format.help, "");
    EXPECT_STRNE(format.what, "");
    EXPECT_FALSE(format.kinds.empty()) << format.help;
  }
}

TEST_F(DataFormats, EveryModelHasSyntheticData) {
  for (const Kind kind : {Kind::kImages, Kind::kTokens, Kind::kPairs}) {
    const OpenedData data = open_data(request_for(kind, "synthetic"));
    EXPECT_GT(data.train->size(), 0);
    EXPECT_EQ(data.train->load({0, 1}).num_samples, 2);
  }
}

TEST_F(DataFormats, TextBecomesTokensWithATenthForEvaluation) {
  const std::string path = write("poem.txt", std::string(1000, 'a'));
  const OpenedData data = open_data(request_for(Kind::kTokens, path));
  EXPECT_EQ(data.train->size(), 900 / 8);
  EXPECT_EQ(data.eval->size(), (100 - 1) / 8);
  ASSERT_TRUE(data.tokenizer);
  EXPECT_EQ(data.tokenizer->vocabulary(), 256);
}

TEST_F(DataFormats, DataThatTheModelDoesNotReadIsRefusedWithWhatItReads) {
  try {
    open_data(request_for(Kind::kImages, write("poem.txt", "abc")));
    FAIL() << "an image model took a text";
  } catch (const DataError& error) {
    const std::string message = error.what();
    for (const char* part :
         {"some_model reads images", "poem.txt' is a text file",
          "give synthetic, or a folder with inputs.npy", ", or fashion-mnist or an IDX folder"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
  EXPECT_THROW(open_data(request_for(Kind::kTokens, folder_.path().string())), DataError);
  EXPECT_THROW(open_data(request_for(Kind::kPairs, "fashion-mnist")), DataError);
}

}  // namespace
}  // namespace headroom
