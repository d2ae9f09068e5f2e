#include "train/evaluator.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include <headroom/model/chain.h>

#include "train/stop.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>
#include <vector>

namespace headroom {

// Sums over the evaluation data, as ranks send them to each other.
struct Evaluator::Sums {
  double loss = 0.0;
  std::int64_t num_items = 0;
  std::int64_t num_samples = 0;
  std::int64_t count_correct = 0;
  bool counts_answers = false;
  bool guesses_tokens = false;
  bool is_stopped = false;
  bool has_failed = false;

  void add(const Sums& other) {
    loss += other.loss;
    num_items += other.num_items;
    num_samples += other.num_samples;
    count_correct += other.count_correct;
    counts_answers = counts_answers || other.counts_answers;
    guesses_tokens = guesses_tokens || other.guesses_tokens;
    is_stopped = is_stopped || other.is_stopped;
    has_failed = has_failed || other.has_failed;
  }
};

namespace {

// Spilling is for training: an evaluation holds one boundary at a time.
ExecutorOptions evaluation_options(const RunSettings& settings, StaticPager* pager,
                                   std::size_t num_stages) {
  ExecutorOptions options = settings.executor_options();
  options.boundary_formats.clear();
  options.before_evaluated_stage = [pager, num_stages](std::size_t stage) {
    if (pager == nullptr || !pager->is_active()) return;
    if (stage == 0) pager->start(forward_steps(pager->units(), num_stages));
    pager->before(stage);
  };
  return options;
}

std::vector<std::int64_t> samples_from(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> indices;
  for (std::int64_t i = begin; i < end; ++i) indices.push_back(i);
  return indices;
}

MicroBatch load(const Dataset& data, const std::vector<std::int64_t>& indices) {
  const OwnerScope owner(Owner::kInputs);
  return data.load(indices);
}

}  // namespace

EvaluationScope::EvaluationScope(const Chain& chain) {
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const auto module = chain.stage(i).module();
    if (!module) continue;
    for (const auto& part : module->modules()) modes_.emplace_back(part, part->is_training());
  }
  chain.train(false);
}

EvaluationScope::~EvaluationScope() {
  // train() sets the children as well, which then get their own mode back.
  for (const auto& [module, is_training] : modes_) module->train(is_training);
}

Evaluator::Evaluator(const RunSettings& settings, const Chain& chain,
                     std::shared_ptr<const Dataset> data, StaticPager* pager)
    : settings_(settings),
      chain_(chain),
      executor_(chain, evaluation_options(settings, pager, chain.size())),
      data_(std::move(data)) {}

std::optional<EvalResults> Evaluator::check_data() const {
  if (!data_) return std::nullopt;
  if (data_->size() == 0) throw DataError("the evaluation data has no sample");
  const RandomStateScope same_random_state(RandomState::capture());
  const torch::NoGradGuard no_grad;
  const EvaluationScope evaluating(chain_);
  try {
    Sums sums;
    ClassCounts classes;
    const MicroBatch micro = load(*data_, {0});
    add(executor_.evaluate(micro), micro, sums, classes);
    return results_of(sums, classes);
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;  // planning says what the budget holds
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    throw DataError(fmt::format("the evaluation data does not fit the model: {}",
                                what.substr(0, what.find('\n'))));
  }
}

bool Evaluator::is_due(std::int64_t update, double epochs_done) const {
  if (!data_) return false;
  const std::string& strategy = settings_.arguments.eval_strategy;
  if (strategy == "steps") return update % settings_.arguments.eval_steps == 0;
  return strategy == "epoch" && epochs_done == std::floor(epochs_done);
}

void Evaluator::add(const std::vector<at::Tensor>& outputs, const MicroBatch& micro, Sums& sums,
                    ClassCounts& classes) {
  sums.loss += outputs.at(0).item<double>();
  sums.num_items += micro.num_items;
  sums.num_samples += micro.num_samples;
  if (outputs.size() > 1) {
    sums.count_correct += outputs[1].item<std::int64_t>();
    sums.counts_answers = true;
  } else {
    sums.guesses_tokens = !micro.targets.empty() && micro.targets[0].scalar_type() == at::kLong;
  }
  if (outputs.size() > 2) classes.add(outputs[2], micro.targets.at(0));
}

Evaluator::Sums Evaluator::sum_over(const Share& share, std::int64_t batch,
                                    ClassCounts& classes) const {
  const torch::NoGradGuard no_grad;
  const EvaluationScope evaluating(chain_);
  const std::int64_t group =
      compares_embeddings(chain_) ? std::max(batch, settings_.window_samples()) : batch;
  Sums sums;
  data_->expect(samples_from(share.begin, std::min(share.begin + group, share.end)));
  for (std::int64_t first = share.begin; first < share.end; first += group) {
    if (stop_is_requested()) {
      sums.is_stopped = true;
      break;
    }
    const std::int64_t end = std::min(first + group, share.end);
    data_->expect(samples_from(end, std::min(end + group, share.end)));
    add_samples(first, end, batch, sums, classes);
  }
  return sums;
}

void Evaluator::add_samples(std::int64_t begin, std::int64_t end, std::int64_t batch, Sums& sums,
                            ClassCounts& classes) const {
  MicroBatch micro;
  if (compares_embeddings(chain_)) {
    const std::vector<at::Tensor> outputs = compare_samples(begin, end, batch, micro);
    add(outputs, micro, sums, classes);
  } else {
    micro = load(*data_, samples_from(begin, end));
    add(executor_.evaluate(micro), micro, sums, classes);
  }
}

std::vector<at::Tensor> Evaluator::compare_samples(std::int64_t begin, std::int64_t end,
                                                   std::int64_t batch, MicroBatch& counts) const {
  std::vector<std::vector<at::Tensor>> parts;  // of each embedding, by micro-batch
  for (std::int64_t first = begin; first < end; first += batch) {
    const MicroBatch micro = load(*data_, samples_from(first, std::min(first + batch, end)));
    const std::vector<at::Tensor> embeddings = executor_.forward(micro, chain_.size() - 1);
    parts.resize(embeddings.size());
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(embeddings[i]);
    counts.num_samples += micro.num_samples;
    counts.num_items += micro.num_items;
  }
  std::vector<at::Tensor> all;
  for (std::vector<at::Tensor>& part : parts) all.push_back(at::cat(std::exchange(part, {})));
  return executor_.evaluate_last(all, counts);
}

EvalResults Evaluator::results_of(const Sums& sums, const ClassCounts& classes) {
  EvalResults results;
  results.num_samples = sums.num_samples;
  results.loss = sums.loss / static_cast<double>(std::max<std::int64_t>(sums.num_items, 1));
  if (sums.counts_answers)
    results.accuracy =
        static_cast<double>(sums.count_correct) / static_cast<double>(sums.num_samples);
  results.f1 = classes.f1();
  if (sums.guesses_tokens) results.perplexity = std::exp(results.loss);
  return results;
}

EvalResults Evaluator::run(const RankGroup& ranks, std::int64_t batch) const {
  if (!data_) throw ConfigError("there is no evaluation data");
  Sums mine, all;
  ClassCounts my_classes, classes;
  std::exception_ptr failure;
  try {
    mine = sum_over(share_of(data_->size(), ranks.rank(), ranks.size()), batch, my_classes);
  } catch (const std::exception&) {
    failure = std::current_exception();
    mine.has_failed = true;
  }
  for (const Sums& one : ranks.gather(mine)) all.add(one);
  if (failure) std::rethrow_exception(failure);
  if (all.has_failed) throw OtherRankFailed("the evaluation failed on another rank");
  if (all.is_stopped) throw Stopped();
  for (const std::string& bytes : ranks.gather_bytes(my_classes.bytes())) classes.add_bytes(bytes);
  return results_of(all, classes);
}

const EvalResults& Evaluator::run_after(std::int64_t update, const RankGroup& ranks,
                                        std::int64_t batch) {
  last_ = run(ranks, batch);
  last_update_ = update;
  return *last_;
}

void Evaluator::forget() {
  last_.reset();
  last_update_ = -1;
}

}  // namespace headroom
