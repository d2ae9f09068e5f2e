#include "report/html_page.h"

#include <headroom/core/error.h>
#include "report/json.h"

#include "support/idx_files.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace headroom {
namespace {

using testing::read_file;
using testing::TemporaryFolder;
using testing::write_plain;

TrainResults results_of_a_run() {
  TrainResults results;
  results.train_runtime = 12.5;
  results.train_samples_per_second = 80;
  results.train_loss = 3.25;
  results.final_loss = 2.7554;
  results.global_step = 3;
  results.eval = EvalResults();
  results.eval->loss = 3.0919;
  results.eval->accuracy = 0.875;
  results.eval->num_samples = 10;
  results.peak_memory_bytes = 900 << 10;
  results.memory_budget_bytes = 1 << 20;
  results.predicted_peak_bytes = 800 << 10;
  results.predicted_step_seconds = 0.5;
  results.measured_step_seconds = 0.55;
  results.num_parameters = 1234567;
  results.peak_bytes_by_owner = {{"weights", 100 << 10}, {"activations", 500 << 10}};
  results.weights_sha256 = "0a4e";
  return results;
}

constexpr const char* kPlan = R"({"policy": "optimal",
 "stages": [{"name": "embed", "decision": "keep", "kept_bytes": 1024, "extra_ns": 0},
            {"name": "a<b>&\"c", "decision": "recompute x1", "kept_bytes": 4096, "extra_ns": 2500000},
            {"name": "block1", "decision": "no_gelu", "kept_bytes": 2048, "extra_ns": 1000},
            {"name": "block2", "decision": "no_gelu", "kept_bytes": 2048, "extra_ns": 1000}],
 "operations": [{"op": "forward_keep", "stage": 1, "peak_bytes": 3000, "live_bytes": 1000},
                {"op": "backward", "stage": 2, "peak_bytes": 5000, "live_bytes": 0}],
 "timeline": [{"operation": 0, "live_bytes": 101000, "by_owner": {"weights": 100000, "activations": 1000}},
              {"operation": 1, "live_bytes": 100500, "by_owner": {"weights": 100000, "gradients": 500, "activations": 0}}]})";
constexpr const char* kMetrics =
    "{\"step\": 1, \"loss\": 5.5, \"learning_rate\": 0.001}\n{\"step\": 2, \"loss\": null, "
    "\"learning_rate\": 0.001}\n"
    "{\"step\": 2, \"eval_loss\": 4.5}\n{\"step\": 3, \"loss\": 2.75, \"learning_rate\": 0.0005}\n";

class HtmlPageTest : public ::testing::Test {
 protected:
  HtmlPageTest() {
    write("train_results.json", to_json(results_of_a_run()).dump());
    write("plan.json", kPlan);
    write("metrics.jsonl", kMetrics);
    write(
        "training_args.json",
        R"({"optim": "adamw", "learning_rate": "0.001", "dataset": "</code><script>", "seed": "42"})");
  }
  void write(const std::string& name, const std::string& text) const {
    write_plain(folder_ / name, text);
  }
  std::string page() const { return to_html(read_run(folder_.path().string())); }

  TemporaryFolder folder_;
};

// Every tag that opens closes, in order, and nothing outside of tags looks like one.
void expect_well_formed(const std::string& html) {
  std::vector<std::string> open;
  for (std::size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const std::size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1);
    if (tag.rfind("!doctype", 0) == 0 || tag.rfind("meta", 0) == 0 || tag.back() == '/') continue;
    if (tag.front() == '/') {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ(open.back(), tag.substr(1));
      open.pop_back();
    } else {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
  }
  EXPECT_TRUE(open.empty()) << open.back();
}

void expect_holds(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "lacks " << part;
}

TEST_F(HtmlPageTest, ShowsWhatTheRunLeft) {
  const std::string html = page();
  expect_well_formed(html);
  for (const char* part :
       {"2.7554", "87.50%", "3.0919", "12.5 s", "900.00 KiB", "87.9% of the budget of 1.00 MiB",
        "800.00 KiB", "+12.5%", "+10.0%", "1.2 million parameters", "recompute x1", "2.50 ms",
        "4.00 KiB", "block1 … block2", "(2 stages)", "backward of a&lt;b&gt;", "learning_rate",
        "0a4e"}) {
    expect_holds(html, part);
  }
}

TEST_F(HtmlPageTest, NeedsNothingElseAndLetsNoTextBecomeMarkup) {
  const std::string html = page();
  for (const char* part : {"<script", "http:", "https:", "src=", "href=", "@import", "url("}) {
    EXPECT_EQ(html.find(part), std::string::npos) << part;
  }
  expect_holds(html, "&lt;/code&gt;&lt;script&gt;");
  expect_holds(html, "a&lt;b&gt;&amp;&quot;c");
  expect_holds(html, "prefers-color-scheme: dark");
}

TEST_F(HtmlPageTest, AddsWhatIsLiveToWhatThePlanPredicts) {
  const RunRecord run = read_run(folder_.path().string());
  ASSERT_EQ(run.timeline.size(), 2U);
  EXPECT_EQ(run.timeline[0].peak_bytes, 100000 + 3000);
  EXPECT_EQ(run.timeline[1].peak_bytes, 101000 + 5000 - 1000);
  EXPECT_TRUE(std::isnan(run.updates[1].loss)) << "null is not a number";
  EXPECT_EQ(run.evaluations.size(), 1U);
}

TEST_F(HtmlPageTest, ARunWithoutMetricsPredictionOrEvaluationHasAPageToo) {
  TrainResults results = results_of_a_run();
  results.eval.reset();
  results.memory_budget_bytes = results.predicted_peak_bytes = 0;
  results.predicted_step_seconds = 0;
  results.final_loss = std::nan("");
  write("train_results.json", to_json(results).dump());
  write("plan.json", R"({"micro_batch_size": 8})");
  std::filesystem::remove(folder_ / "metrics.jsonl");
  std::filesystem::remove(folder_ / "training_args.json");
  const std::string html = page();
  expect_well_formed(html);
  expect_holds(html, "No update was logged");
  expect_holds(html, "no budget");
  EXPECT_EQ(html.find("<svg"), std::string::npos);
}

TEST_F(HtmlPageTest, ALanguageModelHasNoAccuracy) {
  TrainResults results = results_of_a_run();
  results.eval->accuracy.reset();
  write("train_results.json", to_json(results).dump());
  const std::string html = page();
  expect_holds(html, "Evaluation loss");
  EXPECT_EQ(html.find("Accuracy"), std::string::npos);
}

TEST_F(HtmlPageTest, NumbersAtTheEndsOfTheirRangeMakeNoEndlessPage) {
  for (const char* rate : {"1e308", "-1e308", "5e-324", "1e-310", "1e300", "-1e290"}) {
    write("metrics.jsonl", std::string("{\"step\": 1, \"loss\": 1e308, \"learning_rate\": 0}\n") +
                               "{\"step\": 2, \"loss\": -1e308, \"learning_rate\": " + rate +
                               "}\n{\"step\": 3, \"loss\": 1, \"learning_rate\": 1e289}\n");
    const std::string html = page();
    expect_well_formed(html);
    EXPECT_LT(html.size(), 60000U) << rate;
    for (const char* part : {" inf", " -inf", " nan", "Mnan"})
      EXPECT_EQ(html.find(part), std::string::npos) << part << " with " << rate;
  }
  write("metrics.jsonl", "{\"step\": 9223372036854775807, \"eval_loss\": 1}\n");
  EXPECT_THROW(page(), DataError);
}

TEST_F(HtmlPageTest, ALongRunIsNoLargePage) {
  std::string lines;
  for (int i = 1; i <= 50000; ++i)
    lines += "{\"step\": " + std::to_string(i) + ", \"loss\": 1.5, \"learning_rate\": 0.001}\n";
  write("metrics.jsonl", lines);
  const std::string html = page();
  expect_well_formed(html);
  EXPECT_LT(html.size(), 60000U);
}

TEST_F(HtmlPageTest, MissingAndDamagedFilesAreNamed) {
  const std::vector<std::string> names = {"train_results.json", "plan.json", "metrics.jsonl",
                                          "training_args.json"};
  for (const std::string& name : names) {
    const std::string whole = read_file(folder_ / name);
    std::vector<std::string> damaged = {"[1, 2]", "{", whole.substr(0, whole.size() / 2),
                                        std::string("\x00\xff", 2) + whole};
    if (name == "plan.json") {
      for (const char* text : {R"({"policy": 3})", R"({"policy": "optimal"})",
                               R"({"policy": "optimal", "stages": [7]})"})
        damaged.push_back(text);
      std::string other = whole;
      other.replace(other.find("\"operation\": 1"), 14, "\"operation\": 9");
      damaged.push_back(other);
      other = whole;
      other.replace(other.find("\"stage\": 2"), 10, "\"stage\": 0");
      damaged.push_back(other);
    }
    if (name == "train_results.json") damaged.push_back(R"({"train_runtime": "long"})");
    if (name == "metrics.jsonl") damaged.push_back(R"({"loss": 3})");
    for (const std::string& text : damaged) {
      write(name, text);
      try {
        page();
        ADD_FAILURE() << name << " was taken: " << text.substr(0, 40);
      } catch (const DataError& error) {
        const std::string message = error.what();
        EXPECT_NE(message.find(name), std::string::npos) << message;
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      }
    }
    if (name == "train_results.json" || name == "plan.json") {
      std::filesystem::remove(folder_ / name);
      EXPECT_THROW(page(), DataError) << name;
    }
    write(name, whole);
  }
  EXPECT_THROW(read_run(folder_ / "absent"), DataError);
  EXPECT_NO_THROW(page());
}

}  // namespace
}  // namespace headroom
