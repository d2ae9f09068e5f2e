#include "train/profile_book.h"

#include <headroom/data/dataset.h>
#include <headroom/model/zoo.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>

#include "core/log.h"
#include "train/training_support.h"

namespace headroom {
namespace {

using namespace headroom::testing;

struct ProfileBookTest : ::testing::Test {
  ProfileBookTest() { set_log_quiet(true); }

  // Counts the samples of every micro-batch that is run.
  ProfileBook book(const std::string& model, const std::string& key = "key") {
    models_.push_back(std::make_unique<ZooModel>(make_model(model, kSizes.at(model))));
    const ZooModel& made = *models_.back();
    data_ = made.input.kind == ModelInput::Kind::kTokens
                ? make_synthetic_tokens(64, made.input.length, made.input.vocabulary, 3)
                : make_synthetic_images(64, made.input.channels, made.input.rows,
                                        made.input.columns, made.input.num_classes, 3);
    const auto load = [this](std::int64_t size) {
      loaded_.push_back(size);
      std::vector<std::int64_t> indices(static_cast<std::size_t>(size));
      std::iota(indices.begin(), indices.end(), 0);
      return data_->load(indices);
    };
    return {made.chain, load, std::nullopt, std::nullopt, "", folder_ / "profile", key};
  }

  std::int64_t largest_loaded() const { return *std::max_element(loaded_.begin(), loaded_.end()); }

  const std::map<std::string, std::string> kSizes = {
      {"gpt", "n_layer=2,n_embd=32,n_head=2,block_size=16,vocab_size=64,dropout=0"},
      {"nin", "width=4,rows=14,columns=14"}};
  TemporaryFolder folder_;
  std::vector<std::unique_ptr<ZooModel>> models_;
  std::shared_ptr<Dataset> data_;
  std::vector<std::int64_t> loaded_;
};

TEST_F(ProfileBookTest, BytesThatAreCountedNeedNoRunOfAllSamples) {
  ProfileBook few = book("gpt");
  ASSERT_TRUE(few.know(32));
  EXPECT_TRUE(few.is_known(32));
  EXPECT_EQ(largest_loaded(), 8);
  EXPECT_FALSE(few.is_known(33)) << "a line is drawn out by no more than a factor of four";
  EXPECT_FALSE(few.is_known(3)) << "nor to sizes below all that were measured";

  ProfileBook whole = book("gpt");
  ASSERT_TRUE(whole.measure(32));
  const auto counted = few.at(32).grads_preallocated, measured = whole.at(32).grads_preallocated;
  for (std::size_t stage = 0; stage < measured.stages.size(); ++stage) {
    SCOPED_TRACE(measured.stages[stage].name);
    EXPECT_EQ(counted.stages[stage].output_bytes, measured.stages[stage].output_bytes);
    for (std::size_t option = 0; option < measured.stages[stage].options.size(); ++option) {
      const StageOption& by_count = counted.stages[stage].options[option];
      const StageOption& by_run = measured.stages[stage].options[option];
      EXPECT_EQ(by_count.kept_bytes, by_run.kept_bytes);
      EXPECT_GE(by_count.backward_transient_bytes, by_run.backward_transient_bytes);
      EXPECT_LE(by_count.backward_transient_bytes, by_run.backward_transient_bytes + 64);
    }
  }
}

TEST_F(ProfileBookTest, BytesThatOnlyARunTellsAreMeasuredAtTheirSize) {
  ProfileBook convolutions = book("nin");
  ASSERT_TRUE(convolutions.know(32));
  EXPECT_TRUE(convolutions.is_measured(32));
}

TEST_F(ProfileBookTest, ASecondRunMeasuresNothing) {
  int num_measured = 0;
  const auto measure = [&] { return std::make_optional(1.25 + num_measured++); };
  ProfileBook first = book("gpt");
  first.explore(64);
  first.know(64);
  EXPECT_EQ(first.figure("trial of a schedule", measure), 1.25);
  EXPECT_EQ(first.figure("trial of a schedule", measure), 1.25);
  first.save();

  loaded_.clear();
  ProfileBook second = book("gpt");
  second.explore(64);
  EXPECT_TRUE(second.know(64));
  EXPECT_EQ(second.figure("trial of a schedule", measure), 1.25);
  EXPECT_EQ(num_measured, 1);
  EXPECT_EQ(second.seconds(), 0.0);
  EXPECT_LE(loaded_.size(), 1u) << "at most one sample, for its shapes";

  EXPECT_EQ(book("gpt", "another machine").figure("trial of a schedule", measure), 2.25);
}

TEST_F(ProfileBookTest, AnIndexOfAnotherFormIsNotUsed) {
  ProfileBook first = book("gpt");
  first.measure(4);
  first.save();
  std::ofstream(folder_ / "profile/index.txt") << "key\n4 128 1000\n";
  EXPECT_FALSE(book("gpt").is_measured(4));
  std::ofstream(folder_ / "profile/index.txt") << "key\nsize 4 128\n";
  EXPECT_FALSE(book("gpt").is_measured(4));
  std::ofstream(folder_ / "profile/index.txt") << "key\nsize -4 128 1000\nfigure 1e300 trial\n";
  ProfileBook odd = book("gpt");
  EXPECT_FALSE(odd.is_measured(-4));
  EXPECT_EQ(odd.figure("trial", [] { return 2.0; }), 2.0);
}

TEST_F(ProfileBookTest, AFigureThatCouldNotBeHadIsAskedForAgain) {
  ProfileBook some = book("gpt");
  EXPECT_FALSE(some.figure("trial", [] { return std::nullopt; }).has_value());
  EXPECT_EQ(some.figure("trial", [] { return 2.0; }), 2.0);
}

}  // namespace
}  // namespace headroom
