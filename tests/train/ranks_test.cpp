// Training on several ranks gives the numbers of one. The ranks are processes of this program,
// which run RankBody and leave what they found.
#include <headroom/comm/communicator.h>
#include <headroom/core/error.h>
#include <headroom/execute/checkpoint.h>
#include <headroom/memory/meter.h>
#include <headroom/train/trainer.h>
#include "core/log.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/rank_processes.h"
#include "train/budget_runs.h"
#include "train/compared_chain.h"
#include "train/training_support.h"
#include "train/varying_tokens.h"

#include <cstdlib>

namespace headroom {
namespace {

using namespace headroom::testing;
using nlohmann::json;

// Passes everything on, and counts.
class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}
  std::int64_t rank() const override { return inner_->rank(); }
  std::int64_t size() const override { return inner_->size(); }
  void sum(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch) override {
    ++num_sums;
    inner_->sum(tensors, scratch);
  }
  void broadcast(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch) override {
    inner_->broadcast(tensors, scratch);
  }
  std::string broadcast_bytes(const std::string& bytes) override {
    return inner_->broadcast_bytes(bytes);
  }
  std::vector<std::string> gather(const std::string& bytes) override {
    ++num_gathers;
    return inner_->gather(bytes);
  }
  void leave() noexcept override { inner_->leave(); }

  int num_sums = 0;
  int num_gathers = 0;

 private:
  std::shared_ptr<Communicator> inner_;
};

// Sequences of which only the first so many places count, by sample.
class SequenceData final : public Dataset {
 public:
  SequenceData() {
    seed_everything(3);
    rows = torch::randn({kSamples, kLength, kWidth});
    labels = torch::randint(kClasses, {kSamples, kLength}, torch::kLong);
    for (std::int64_t i = 0; i < kSamples; ++i) labels[i].slice(0, count(i)).fill_(-100);
  }
  std::int64_t size() const override { return kSamples; }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const at::Tensor chosen = torch::tensor(indices, torch::kLong);
    return {{rows.index_select(0, chosen)},
            {labels.index_select(0, chosen)},
            static_cast<std::int64_t>(indices.size()),
            count_items(indices)};
  }
  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    std::int64_t items = 0;
    for (const std::int64_t index : indices) items += count(index);
    return items;
  }

 private:
  static constexpr std::int64_t kLength = 9;
  static std::int64_t count(std::int64_t sample) { return 1 + sample * 5 % kLength; }
  at::Tensor rows;    // (N, T, width)
  at::Tensor labels;  // (N, T)
};

Chain sequence_chain() {
  return Chain::from_sequential(
      make_plain_network(5).ptr(),
      [](const std::vector<at::Tensor>& outputs, const MicroBatch& micro) {
        return torch::nn::functional::cross_entropy(
            outputs[0].flatten(0, 1), micro.targets[0].flatten(),
            torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      });
}

// With parts that recompute, as a user's own model may have.
Chain checkpointed_chain(bool recomputes) {
  seed_everything(5);
  const torch::nn::Linear first(kWidth, 16), second(16, kClasses);
  Chain chain;
  chain.add("first", first.ptr(),
            [first, recomputes](const std::vector<at::Tensor>& inputs,
                                const MicroBatch&) -> std::vector<at::Tensor> {
              const auto forward = [first](const at::Tensor& x) {
                return torch::dropout(torch::tanh(first.ptr()->forward(x)), 0.3, true);
              };
              return {recomputes ? checkpoint(forward, inputs[0]) : forward(inputs[0])};
            });
  chain.add("second", second.ptr(),
            [second](const std::vector<at::Tensor>& inputs,
                     const MicroBatch& micro) -> std::vector<at::Tensor> {
              return {summed_cross_entropy({second.ptr()->forward(inputs[0])}, micro)};
            });
  return chain;
}

TrainingArguments window_of_eight(const std::string& output_dir) {
  TrainingArguments arguments = plain_arguments(output_dir);
  arguments.per_device_train_batch_size = 0;
  arguments.global_batch_size = 8;
  return arguments;
}

constexpr std::int64_t kNoisyWindow = 12;

// BatchNorm needs two samples at least: these divide evenly.
std::shared_ptr<TableData> noisy_data() { return make_data(2 * kNoisyWindow); }

// Dropout, BatchNorm, shuffling, AdamW, a falling learning rate, clipping, several micro-batches on
// each rank.
TrainingArguments noisy_rank_arguments(const std::string& output_dir) {
  TrainingArguments arguments = window_of_eight(output_dir);
  arguments.global_batch_size = kNoisyWindow;
  arguments.per_device_train_batch_size = 2;
  arguments.shuffle = true;
  arguments.optim = "adamw";
  arguments.learning_rate = 1e-2;
  arguments.lr_scheduler_type = "cosine";
  arguments.max_grad_norm = 1.0;
  return arguments;
}

json logged_losses(const std::string& output_dir) {
  json losses = json::array();
  for (const auto& line : metrics_of(output_dir)) {
    if (line.contains("loss")) losses.push_back(line["loss"]);
  }
  return losses;
}

std::vector<float> values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<float> values;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor flat = tensor.detach().contiguous();
    values.insert(values.end(), flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel());
  }
  return values;
}

// Sequences whose length goes up and down from sample to sample, so that ranks meet different ones
// in the same window.
RunCase varying_run() {
  return {"gpt", "n_layer=3,n_head=2,n_embd=32,block_size=64,vocab_size=64", 6, 1, "adamw"};
}

std::shared_ptr<const Dataset> with_varying_lengths(std::shared_ptr<const Dataset> data) {
  return std::make_shared<VaryingTokens>(
      std::move(data), [](std::int64_t sample) { return 9 + sample * sample % 56; });
}

// A single process takes one sample at a time in it, and recomputes.
std::int64_t varying_budget(const std::string& folder) {
  const BudgetRange range = budget_range(varying_run(), folder);
  return range.floor_bytes + (range.ample_bytes - range.floor_bytes) / 3 +
         (std::int64_t{1} << 17);  // summing takes some
}

// What the ranks do, case by case. Every rank fills `found`; rank 0's also holds the losses.
class Body {
 public:
  Body(std::shared_ptr<Communicator> comm, std::string folder)
      : comm_(std::move(comm)), folder_(std::move(folder)) {}

  json run() {
    plain_cases();
    noisy_cases();
    stopped_cases();
    memory_cases();
    return found_;
  }

 private:
  std::string at(const std::string& name) const { return folder_ + "/" + name; }
  bool is_first() const { return comm_->rank() == 0; }

  TrainResults train(const std::string& name, const TrainingArguments& arguments,
                     const Chain& chain, const std::shared_ptr<const Dataset>& data,
                     const std::shared_ptr<const Dataset>& eval = nullptr) {
    const TrainResults results = Trainer(arguments, chain, data, eval, comm_).train();
    found_[name] = {{"sha", results.weights_sha256},
                    {"own_sha", weights_sha256(chain)},
                    {"step", results.global_step},
                    {"world_size", results.world_size},
                    {"loss", results.train_loss},
                    {"skipped", results.num_skipped_updates},
                    {"steps_per_rank", results.gradient_accumulation_steps},
                    {"weights", values_of(chain.parameters())}};
    if (results.eval)
      found_[name]["eval"] = {results.eval->loss, *results.eval->accuracy,
                              results.eval->num_samples};
    if (is_first()) found_[name]["losses"] = logged_losses(arguments.output_dir);
    return results;
  }

  void plain_cases() {
    const auto own_seed =
        static_cast<std::uint64_t>(5 + comm_->rank());  // rank 0's weights must become everyone's
    train("plain", window_of_eight(at("plain")), chain_of(make_plain_network(own_seed)),
          make_data(), make_data(13));
    TrainingArguments tiny = window_of_eight(at("tiny"));
    tiny.global_batch_size = 2;
    train("tiny", tiny, chain_of(make_plain_network(5)), make_data());
    TrainingArguments product = plain_arguments(at("product"));
    product.per_device_train_batch_size = 2;
    product.gradient_accumulation_steps = "2";
    train("product", product, chain_of(make_plain_network(5)), make_data());
    TrainingArguments sequences = window_of_eight(at("sequences"));
    sequences.per_device_train_batch_size = 3;
    train("sequences", sequences, sequence_chain(), std::make_shared<SequenceData>());
    const auto data = make_data();
    data->rows[9][2] = std::nan("");
    train("nan", window_of_eight(at("nan")), chain_of(make_plain_network(5)), data);
    TrainingArguments clipped = window_of_eight(at("clipped"));
    clipped.max_grad_norm = 0.05;
    train("clipped", clipped, chain_of(make_plain_network(5)), make_data());
    for (const std::int64_t window : {8, 2}) {
      TrainingArguments compared = window_of_eight(at(fmt::format("compared{}", window)));
      compared.global_batch_size = window;
      compared.per_device_train_batch_size = 2;
      train(fmt::format("compared{}", window), compared, compared_chain(5), make_data());
    }
    count_syncs();
  }

  void count_syncs() {
    TrainingArguments arguments = window_of_eight(at("syncs"));
    arguments.per_device_train_batch_size = 1;
    arguments.max_steps = 2;
    const auto counts = [&] {
      const auto counting = std::make_shared<CountingCommunicator>(comm_);
      Trainer(arguments, chain_of(make_plain_network(5)), make_data(), nullptr, counting).train();
      return std::pair<int, int>(counting->num_sums, counting->num_gathers);
    };
    const auto two = counts();
    arguments.max_steps = 5;
    const auto five = counts();
    found_["syncs"] = {{"of_two", two.first},
                       {"of_five", five.first},
                       {"gathers_of_three", five.second - two.second}};
  }

  void noisy_cases() {
    train("noisy", noisy_rank_arguments(at("noisy")), chain_of(make_noisy_network(5)),
          noisy_data());
    found_["noisy"]["next_random"] = torch::rand({1}).item<float>();
    for (const char* policy : {"every", "sqrt"}) {
      TrainingArguments arguments = noisy_rank_arguments(at(policy));
      arguments.gradient_checkpointing = policy;
      train(policy, arguments, chain_of(make_noisy_network(5)), noisy_data());
    }
    train("kept", noisy_rank_arguments(at("kept")), checkpointed_chain(false), noisy_data());
    train("checkpointed", noisy_rank_arguments(at("checkpointed")), checkpointed_chain(true),
          noisy_data());
  }

  void stopped_cases() {
    TrainingArguments cut = noisy_rank_arguments(at("cut"));
    const auto data = noisy_data();
    const std::int64_t loads_per_update = kNoisyWindow / comm_->size() / 2;
    std::int64_t num_loaded = 0;
    data->on_load = [&](c10::ArrayRef<std::int64_t>) {
      if (comm_->rank() == 1 && ++num_loaded == loads_per_update + 1)
        Trainer::request_stop();  // in update 2, and on one rank alone
    };
    train("cut", cut, chain_of(make_noisy_network(5)), data);
    cut.resume_from_checkpoint = "last";
    train("resumed", cut, chain_of(make_noisy_network(99)), noisy_data());
  }

  // Ranks measure times, and budgets that depend on them differ.
  std::int64_t of_rank_zero(std::int64_t value) {
    return std::stoll(comm_->broadcast_bytes(std::to_string(value)));
  }

  // Memory runs out on the last rank alone, in the middle of a window.
  void memory_cases() {
    set_log_quiet(true);
    const RunCase run{"resnet", "blocks=12,width=4,rows=10,columns=10,norm=0", 4 * comm_->size(), 2,
                      "adamw"};
    const BudgetRange range = [&] {
      TrainingArguments arguments = arguments_of(run, std::int64_t{1} << 40, at("range"));
      arguments.nproc_per_node = comm_->size();
      return budget_range(run, arguments);
    }();
    const std::int64_t ample = of_rank_zero(range.ample_bytes);
    const std::int64_t low =
        of_rank_zero(range.floor_bytes + (range.ample_bytes - range.floor_bytes) / 5);
    memory_case("ample", run, 0, {});
    memory_case("budget", run, low, {});
    memory_case("update", {"mlp", "hidden=64", 4 * comm_->size(), 0, "adamw"},
                std::int64_t{1200} << 10, {});
    const RunCase varying = varying_run();
    memory_case("varying", varying, of_rank_zero(varying_budget(at("varying"))),
                with_varying_lengths);
    found_["varying"]["losses"] = is_first() ? logged_losses(at("varying")) : json();
    memory_case("lowered", run, ample, [&](auto data) -> std::shared_ptr<const Dataset> {
      if (comm_->rank() + 1 < comm_->size()) return data;
      return std::make_shared<CapLoweringData>(data, 5, low);
    });
  }

  void memory_case(const std::string& name, const RunCase& run, std::int64_t budget,
                   const PreparedRun::Wrap& wrap) {
    MemoryMeter::instance().set_cap(0);
    TrainingArguments arguments = arguments_of(run, budget, at(name));
    arguments.report_to = "jsonl";
    PreparedRun prepared(run, arguments, wrap, comm_);
    const TrainResults results = prepared.trainer->train();
    found_[name] = {{"sha", results.weights_sha256},
                    {"own_sha", results.weights_sha256},
                    {"recoveries", results.num_recoveries},
                    {"plans", results.num_plans},
                    {"budget", budget},
                    {"own_peak", MemoryMeter::instance().peak_bytes()},
                    {"peak", results.peak_memory_bytes},
                    {"predicted", results.predicted_peak_bytes},
                    {"recomputed", results.recomputed_forward_fraction},
                    {"step", results.global_step}};
  }

  std::shared_ptr<Communicator> comm_;
  std::string folder_;
  json found_;
};

constexpr std::chrono::seconds kTimeout{30};

TEST(RankBody, DISABLED_Trains) {
  set_log_quiet(true);
  const RankEnvironment ranks = RankEnvironment::read();
  const std::string folder = std::getenv("HEADROOM_TEST_FOLDER");
  const json found = Body(join_ranks(ranks, kTimeout), folder).run();
  write_plain(folder + "/rank-" + std::to_string(ranks.rank) + ".json", found.dump());
}

// What one rank does that the others do not know of.
TEST(RankBody, DISABLED_Fails) {
  RankEnvironment ranks = RankEnvironment::read();
  const std::string folder = std::getenv("HEADROOM_TEST_FOLDER");
  const bool is_last = ranks.rank + 1 == ranks.size;
  {
    const auto data = make_data();
    int num_loaded = 0;
    data->on_load = [&](c10::ArrayRef<std::int64_t>) {
      if (is_last && ++num_loaded == 2) throw DataError("the disk is on fire");
    };
    Trainer trainer(window_of_eight(folder + "/fire"), chain_of(make_plain_network(5)), data,
                    nullptr, join_ranks(ranks, kTimeout));
    if (is_last) {
      EXPECT_THROW(trainer.train(), DataError);
    } else {
      EXPECT_THROW(trainer.train(), CommError);
    }
  }
  ranks.store_prefix += "/again";
  TrainingArguments arguments = window_of_eight(folder + "/unlike");
  if (is_last) arguments.learning_rate = 0.7;
  Trainer trainer(arguments, chain_of(make_plain_network(5)), make_data(), nullptr,
                  join_ranks(ranks, kTimeout));
  try {
    trainer.train();
    ADD_FAILURE() << "ranks with different arguments were trained";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("--learning_rate 0.7"), std::string::npos)
        << error.what();
  }
}

class Ranks : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() {
    set_log_quiet(true);
    folders = std::make_unique<TemporaryFolder>();
    for (const int size : {2, 3}) {
      const std::string folder = *folders / std::to_string(size);
      std::filesystem::create_directories(folder);
      if (!run_as_ranks(size, "RankBody.DISABLED_Trains",
                        {{"HEADROOM_TEST_FOLDER", folder}, {"OMP_NUM_THREADS", "1"}}))
        continue;
      for (int rank = 0; rank < size; ++rank) {
        found[size].push_back(
            json::parse(read_file(folder + "/rank-" + std::to_string(rank) + ".json")));
      }
    }
  }
  static void TearDownTestSuite() { folders.reset(); }

  void SetUp() override {
    ASSERT_EQ(found[GetParam()].size(), static_cast<std::size_t>(GetParam())) << "the ranks failed";
  }

  const json& at(const std::string& name, int rank = 0) const {
    return found[GetParam()][static_cast<std::size_t>(rank)].at(name);
  }

  void expect_equal_ranks(const std::string& name) const {
    for (int rank = 0; rank < GetParam(); ++rank) {
      EXPECT_EQ(at(name, rank).at("sha"), at(name).at("sha")) << name << " on rank " << rank;
      EXPECT_EQ(at(name, rank).at("own_sha"), at(name).at("sha")) << name << " on rank " << rank;
      EXPECT_EQ(at(name, rank).at("step"), at(name).at("step")) << name << " on rank " << rank;
    }
  }

  // The same losses and weights as in one process, up to the order of sums.
  void expect_numbers_of_one_rank(const std::string& name, const TrainingArguments& arguments,
                                  const Chain& chain,
                                  const std::shared_ptr<const Dataset>& data) const {
    SCOPED_TRACE(name);
    expect_equal_ranks(name);
    const TrainResults one = Trainer(arguments, chain, data).train();
    EXPECT_EQ(at(name).at("step"), one.global_step);
    EXPECT_EQ(at(name).at("world_size"), GetParam());
    const json ours = at(name).at("losses"), theirs = logged_losses(arguments.output_dir);
    ASSERT_EQ(ours.size(), theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i) {
      ASSERT_EQ(ours[i].is_null(), theirs[i].is_null()) << i;
      if (ours[i].is_null()) continue;
      EXPECT_NEAR(ours[i].get<double>(), theirs[i].get<double>(), 2e-6 * theirs[i].get<double>())
          << i;
    }
    const std::vector<float> weights = at(name).at("weights"),
                             expected = values_of(chain.parameters());
    ASSERT_EQ(weights.size(), expected.size());
    for (std::size_t i = 0; i < weights.size(); ++i)
      EXPECT_NEAR(weights[i], expected[i], 1e-6) << i;
  }

  TemporaryFolder folder_;

  static std::unique_ptr<TemporaryFolder> folders;
  static std::map<int, std::vector<json>> found;
};

std::unique_ptr<TemporaryFolder> Ranks::folders;
std::map<int, std::vector<json>> Ranks::found;

TEST_P(Ranks, GiveTheNumbersOfOneProcessAlsoInWindowsThatDoNotDivide) {
  expect_numbers_of_one_rank("plain", window_of_eight(folder_ / "plain"),
                             chain_of(make_plain_network(5)), make_data());
}

TEST_P(Ranks, ARankWithoutSamplesTakesPart) {
  TrainingArguments tiny = window_of_eight(folder_ / "tiny");
  tiny.global_batch_size = 2;
  expect_numbers_of_one_rank("tiny", tiny, chain_of(make_plain_network(5)), make_data());
}

TEST_P(Ranks, TheGlobalBatchIsMicroBatchTimesStepsTimesRanks) {
  TrainingArguments product = window_of_eight(folder_ / "product");
  product.global_batch_size = 4 * GetParam();
  expect_numbers_of_one_rank("product", product, chain_of(make_plain_network(5)), make_data());
  EXPECT_EQ(at("product").at("steps_per_rank"), 2);
}

TEST_P(Ranks, UnequalNumbersOfItemsWeighAsInOneBatch) {
  expect_numbers_of_one_rank("sequences", window_of_eight(folder_ / "sequences"), sequence_chain(),
                             std::make_shared<SequenceData>());
}

TEST_P(Ranks, AnUpdateThatIsNotFiniteIsSkippedEverywhere) {
  const auto data = make_data();
  data->rows[9][2] = std::nan("");
  expect_numbers_of_one_rank("nan", window_of_eight(folder_ / "nan"),
                             chain_of(make_plain_network(5)), data);
  for (int rank = 0; rank < GetParam(); ++rank)
    EXPECT_EQ(at("nan", rank).at("skipped"), 2) << "once in each epoch";
}

TEST_P(Ranks, ClippingUsesTheNormOfTheGlobalBatch) {
  TrainingArguments clipped = window_of_eight(folder_ / "clipped");
  clipped.max_grad_norm = 0.05;
  expect_numbers_of_one_rank("clipped", clipped, chain_of(make_plain_network(5)), make_data());
}

TEST_P(Ranks, CompareTheSamplesOfAllRanks) {
  for (const std::int64_t window : {8, 2}) {
    const std::string name = fmt::format("compared{}", window);
    TrainingArguments compared = window_of_eight(folder_ / name);
    compared.global_batch_size = window;
    expect_numbers_of_one_rank(name, compared, compared_chain(5), make_data());
  }
}

TEST_P(Ranks, EvaluateTheWholeTestSetTogether) {
  const json ours = at("plain").at("eval");
  const TrainResults one = Trainer(window_of_eight(folder_ / "eval"),
                                   chain_of(make_plain_network(5)), make_data(), make_data(13))
                               .train();
  EXPECT_NEAR(ours[0].get<double>(), one.eval->loss, 1e-6);
  EXPECT_EQ(ours[1], *one.eval->accuracy);
  EXPECT_EQ(ours[2], 13);
}

TEST_P(Ranks, SumGradientsAndAgreeOncePerUpdateHoweverManyMicroBatches) {
  for (int rank = 0; rank < GetParam(); ++rank) {
    EXPECT_EQ(at("syncs", rank).at("of_two"), 2);
    EXPECT_EQ(at("syncs", rank).at("of_five"), 5);
    EXPECT_EQ(at("syncs", rank).at("gathers_of_three"), 3);
  }
}

TEST_P(Ranks, HaveOneSetOfBatchNormStatisticsAndTheirOwnRandomNumbers) {
  expect_equal_ranks("noisy");  // the hash covers buffers
  EXPECT_NE(at("noisy", 1).at("next_random"), at("noisy", 0).at("next_random"));
}

TEST_P(Ranks, RecomputingChangesNoNumber) {
  for (const char* name : {"every", "sqrt", "kept", "checkpointed"}) expect_equal_ranks(name);
  EXPECT_EQ(at("every").at("sha"), at("noisy").at("sha"));
  EXPECT_EQ(at("sqrt").at("sha"), at("noisy").at("sha"));
  EXPECT_EQ(at("checkpointed").at("sha"), at("kept").at("sha"));
}

TEST_P(Ranks, AStopOnOneRankStopsAllAfterTheSameUpdateAndResumingIsAsIfThereHadBeenNone) {
  expect_equal_ranks("cut");
  EXPECT_EQ(at("cut").at("step"), 1) << "the update in progress is undone";
  expect_equal_ranks("resumed");
  EXPECT_EQ(at("resumed").at("sha"), at("noisy").at("sha"));
  EXPECT_EQ(at("resumed").at("loss"), at("noisy").at("loss"));
}

TEST_P(Ranks, MemoryThatRunsOutOnOneRankIsPlannedForByAllAndNothingIsLost) {
  for (const char* name : {"ample", "lowered"}) expect_equal_ranks(name);
  for (int rank = 0; rank < GetParam(); ++rank)
    EXPECT_GE(at("lowered", rank).at("recoveries").get<int>(), 1) << rank;
  EXPECT_EQ(at("lowered").at("sha"), at("ample").at("sha"));
}

TEST_P(Ranks, EachRankKeepsToItsBudgetAndToThePrediction) {
  expect_equal_ranks("budget");
  EXPECT_EQ(at("budget").at("sha"), at("ample").at("sha"));
  EXPECT_GT(at("budget").at("recomputed").get<double>(), 0.0);
  for (const char* name :
       {"budget", "update"}) {  // in the second one, summing gradients is the peak
    for (int rank = 0; rank < GetParam(); ++rank) {
      const json& run = at(name, rank);
      EXPECT_LE(run.at("own_peak"), run.at("budget")) << name << " on rank " << rank;
      EXPECT_EQ(run.at("own_peak"), run.at("predicted")) << name << " on rank " << rank;
      EXPECT_EQ(run.at("peak"), run.at("predicted")) << name << " on rank " << rank;
    }
  }
}

TEST_P(Ranks, ThatMeetDifferentShapesTakeTheSamePlanAndGiveTheNumbersOfOne) {
  expect_equal_ranks("varying");
  EXPECT_EQ(at("varying").at("recoveries"), 0) << "planned for before they ran";
  EXPECT_GT(at("varying").at("plans").get<int>(), 1);
  for (int rank = 0; rank < GetParam(); ++rank)
    EXPECT_LE(at("varying", rank).at("own_peak"), at("varying", rank).at("budget")) << rank;
  const RunCase run = varying_run();
  TrainingArguments arguments = arguments_of(run, at("varying").at("budget"), folder_ / "alone");
  arguments.report_to = "jsonl";
  PreparedRun(run, arguments, with_varying_lengths).trainer->train();
  const json ours = at("varying").at("losses"), theirs = logged_losses(arguments.output_dir);
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_NEAR(ours[i].get<double>(), theirs[i].get<double>(), 1e-5) << i;
}

TEST_P(Ranks, ASnapshotOfSeveralRanksGoesOnWithOne) {
  TrainingArguments arguments =
      noisy_rank_arguments(*folders / (std::to_string(GetParam()) + "/cut"));
  arguments.resume_from_checkpoint = arguments.output_dir + "/snapshot-1";
  arguments.output_dir = folder_ / "alone";
  EXPECT_EQ(Trainer(arguments, chain_of(make_noisy_network(1)), noisy_data()).train().global_step,
            at("noisy").at("step"));
}

INSTANTIATE_TEST_SUITE_P(Of, Ranks, ::testing::Values(2, 3),
                         [](const auto& which) { return which.param == 2 ? "Two" : "Three"; });

TEST(RankFailure, IsNoticedByTheOthersAndDifferentArgumentsAreRefused) {
  const TemporaryFolder folder;
  EXPECT_TRUE(
      run_as_ranks(2, "RankBody.DISABLED_Fails",
                   {{"HEADROOM_TEST_FOLDER", folder.path().string()}, {"OMP_NUM_THREADS", "1"}}));
  EXPECT_FALSE(std::filesystem::exists(folder / "fire/train_results.json"));
}

// Parameters that are updated inside backward have gradients that no other rank has added to.
TEST(RankFailure, NoPlanUpdatesInBackward) {
  const RunCase run{"mlp", "hidden=64,layers=6", 8, 0, "adamw"};
  const ScratchFolder folder("in_backward");
  TrainingArguments arguments = arguments_of(run, std::int64_t{1} << 40, folder.path());
  arguments.max_grad_norm = 0;
  const RunPlan ample = PreparedRun(run, arguments).trainer->plan();
  const auto& owners = ample.bytes_by_owner;
  arguments.memory_budget_bytes = owners.at("weights") + owners.at("optimizer") +
                                  owners.at("other") + owners.at("inputs") +
                                  owners.at("gradients") * 3 / 4;
  EXPECT_TRUE(PreparedRun(run, arguments).trainer->plan().updates_in_backward());
  arguments.nproc_per_node = 2;
  EXPECT_THROW(PreparedRun(run, arguments).trainer->plan(), BudgetError);
}

TEST(RankFailure, AskingForRanksWithoutACommunicatorIsRefused) {
  const TemporaryFolder folder;
  TrainingArguments arguments = window_of_eight(folder / "out");
  arguments.nproc_per_node = 2;
  Trainer trainer(arguments, chain_of(make_plain_network(5)), make_data());
  EXPECT_THROW(trainer.train(), ConfigError);
  EXPECT_EQ(trainer.plan().num_micro_batches(), 1);
  EXPECT_EQ(trainer.plan().micro_batch(), 4) << "half of the global batch";
}

}  // namespace
}  // namespace headroom
