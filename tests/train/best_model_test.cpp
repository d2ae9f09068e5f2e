// The best evaluation, early stopping, callbacks, and what evaluations count.
#include "train/best_model.h"
#include "train/class_counts.h"
#include "train/position_text.h"

#include <headroom/comm/communicator.h>
#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include <headroom/model/zoo.h>

#include <gtest/gtest.h>

#include "train/training_support.h"

#include <map>

namespace headroom {
namespace {

using namespace headroom::testing;

class BestModelTest : public ::testing::Test {
 protected:
  TrainingArguments arguments() const {
    TrainingArguments arguments = plain_arguments(folder_ / "run");
    arguments.eval_strategy = "steps";
    arguments.eval_steps = 1;
    arguments.max_steps = 12;
    arguments.learning_rate = 0.5;  // too high: the loss rises again
    return arguments;
  }
  nlohmann::json state() const {
    return nlohmann::json::parse(read_file(folder_ / "run/trainer_state.json"));
  }
  // Losses of the evaluations so far, by update.
  std::map<std::int64_t, double> losses() const {
    std::map<std::int64_t, double> result;
    std::istringstream lines(read_file(folder_ / "run/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const auto entry = nlohmann::json::parse(line);
      if (entry.contains("eval_loss")) result[entry["step"]] = entry["eval_loss"];
    }
    return result;
  }

  TemporaryFolder folder_;
};

TEST_F(BestModelTest, TheRunEndsWithTheWeightsOfItsBestEvaluation) {
  TrainingArguments with_best = arguments();
  with_best.load_best_model_at_end = true;
  Trainer trainer(with_best, chain_of(make_noisy_network(3)), make_data(), make_data(9));
  const TrainResults results = trainer.train();
  const std::map<std::int64_t, double> all = losses();
  const auto best = std::min_element(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  ASSERT_LT(best->first, 12) << "the last evaluation was the best: this tests nothing";
  EXPECT_EQ(*results.best_metric, best->second);
  EXPECT_EQ(state()["best_metric"], best->second);
  EXPECT_EQ(state()["best_model_checkpoint"],
            (folder_ / "run") + "/best-" + std::to_string(best->first));
  EXPECT_EQ(results.eval->loss, best->second);
  // The same run, stopped there.
  TrainingArguments shorter = arguments();
  shorter.output_dir = folder_ / "shorter";
  Trainer reference(shorter, chain_of(make_noisy_network(3)), make_data(), make_data(9));
  reference.set_callbacks({[&](const TrainingState& state, TrainingControl& control) {
                             control.should_stop = state.update == best->first;
                           },
                           {}});
  EXPECT_EQ(reference.train().weights_sha256, results.weights_sha256);
}

TEST_F(BestModelTest, AdaptersAreKeptAndPutBack) {
  TrainingArguments with_best = arguments();
  with_best.load_best_model_at_end = true;
  ZooModel model = make_model("gpt", "n_layer=1,n_head=1,n_embd=8,block_size=8,vocab_size=11");
  add_adapters(model.chain, {2, 4.0, 0.0, {}});
  const RunSettings settings(with_best, 1);
  const RankGroup alone(make_single_communicator());
  const BestModel best(settings, model.chain, alone);
  const auto add_to_all = [&](double value) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor parameter : model.chain.parameters()) parameter.add_(value);
  };
  add_to_all(0.5);
  std::vector<at::Tensor> kept;
  for (const at::Tensor& parameter : model.chain.parameters())
    kept.push_back(parameter.detach().clone());
  TrainingPosition position;
  for (const std::int64_t update : {1, 2}) {
    EvalResults results;
    results.loss = static_cast<double>(update);
    position.global_step = update;
    best.add(results, position);
    if (update == 1) add_to_all(1.0);
  }
  ASSERT_EQ(position.best->update, 1);
  best.restore(position);
  for (std::size_t i = 0; i < kept.size(); ++i)
    EXPECT_TRUE(torch::equal(model.chain.parameters()[i], kept[i]));
}

TEST_F(BestModelTest, TrainingEndsWhenNothingGetsBetter) {
  TrainingArguments patient = arguments();
  patient.early_stopping_patience = 2;
  patient.max_steps = 100;
  Trainer trainer(patient, chain_of(make_noisy_network(3)), make_data(), make_data(9));
  const TrainResults results = trainer.train();
  EXPECT_LT(results.global_step, 100);
  const std::map<std::int64_t, double> all = losses();
  const double before_last_two = std::prev(all.end(), 3)->second;
  for (auto entry = std::prev(all.end(), 2); entry != all.end(); ++entry)
    EXPECT_GE(entry->second, *results.best_metric);
  EXPECT_EQ(before_last_two, *results.best_metric);
  EXPECT_FALSE(trainer.was_interrupted());
}

TEST_F(BestModelTest, CallbacksSeeUpdatesAndEvaluationsAndMayStop) {
  TrainingArguments plain = arguments();
  Trainer trainer(plain, chain_of(make_noisy_network(3)), make_data(), make_data(9));
  std::vector<std::int64_t> updates, evaluations;
  trainer.set_callbacks(
      {[&](const TrainingState& state, TrainingControl&) {
         updates.push_back(state.update);
         EXPECT_EQ(state.num_updates, 12);
         EXPECT_GT(state.loss, 0.0);
       },
       [&](const TrainingState& state, const EvalResults& results, TrainingControl& control) {
         evaluations.push_back(state.update);
         EXPECT_TRUE(results.accuracy.has_value());
         EXPECT_TRUE(results.f1.has_value());
         if (state.update == 3) control.should_stop = true;
       }});
  const TrainResults results = trainer.train();
  EXPECT_EQ(updates, (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(evaluations, updates);
  EXPECT_EQ(results.global_step, 3);
  EXPECT_FALSE(trainer.was_interrupted());
}

TEST_F(BestModelTest, AMetricThatTheModelDoesNotGiveIsRefusedBeforeTraining) {
  TrainingArguments wrong = arguments();
  wrong.metric_for_best_model = "perplexity";
  Trainer trainer(wrong, chain_of(make_noisy_network(3)), make_data(), make_data(9));
  try {
    trainer.train();
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("gives loss, accuracy, f1"), std::string::npos)
        << error.what();
  }
}

TEST(TrainingPositions, RememberTheBestEvaluation) {
  TrainingPosition position;
  position.global_step = 9;
  position.random_states = {"x"};
  position.best = BestEvaluation{0.1 + 0.2, 7};
  position.num_evaluations_since_best = 2;
  const TrainingPosition again = parse_position(position_text(position), "here");
  ASSERT_TRUE(again.best);
  EXPECT_EQ(again.best->metric, 0.1 + 0.2);
  EXPECT_EQ(again.best->update, 7);
  EXPECT_EQ(again.num_evaluations_since_best, 2);
}

TEST(ClassCounts, GiveTheF1OfTwoClassesOrTheMeanOverMore) {
  const auto numbers = [](std::vector<std::int64_t> values) {
    return torch::tensor(values, torch::kLong);
  };
  ClassCounts two;
  EXPECT_FALSE(two.f1());
  two.add(numbers({1, 1, 0, 0, 1}), numbers({1, 0, 0, 1, 1}));
  EXPECT_DOUBLE_EQ(*two.f1(), 2.0 * 2 / (3 + 3));
  ClassCounts more, other;
  more.add(numbers({0, 2}), numbers({0, 1}));
  other.add(numbers({1}), numbers({1}));
  more.add_bytes(other.bytes());
  // Class 0: 1; class 1: 2 * 1 / (1 + 2); class 2: 0.
  EXPECT_DOUBLE_EQ(*more.f1(), (1.0 + 2.0 / 3 + 0.0) / 3);
}

// Notes what was announced, and what was loaded.
class AnnouncedData final : public Dataset {
 public:
  std::int64_t size() const override { return data_->size(); }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    for (const std::int64_t index : indices) loaded.push_back(index);
    if (!loaded.empty() && !announced.empty()) {
      EXPECT_LE(loaded.size(), announced.size());
    }
    return data_->load(indices);
  }
  void expect(c10::ArrayRef<std::int64_t> indices) const override {
    announced.insert(announced.end(), indices.begin(), indices.end());
  }
  mutable std::vector<std::int64_t> announced, loaded;

 private:
  std::shared_ptr<TableData> data_ = make_data();
};

TEST_F(BestModelTest, SamplesAreAnnouncedInTheOrderInWhichTheyAreLoaded) {
  TrainingArguments plain = arguments();
  plain.eval_strategy = "no";
  const auto data = std::make_shared<AnnouncedData>();
  Trainer trainer(plain, chain_of(make_noisy_network(3)), data);
  trainer.train();
  EXPECT_EQ(data->announced, data->loaded);
}

}  // namespace
}  // namespace headroom
