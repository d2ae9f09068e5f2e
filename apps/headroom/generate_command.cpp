#include "commands.h"
#include "report/json.h"
#include "saved_model.h"

#include <headroom/core/error.h>
#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include <headroom/model/generate.h>
#include <headroom/model/pretrained.h>

#include "train/auto_budget.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace headroom {
namespace {

// The flags that only generate has.
struct Request {
  std::string folder;
  std::string prompt;
  std::int64_t max_new_tokens = 100;
  double temperature = 1.0;
  std::int64_t top_k = 0;
};

ZooModel load(const std::string& folder, TrainingArguments arguments) {
  configure_threads(static_cast<int>(arguments.num_threads));
  settle_budget(arguments);
  MemoryMeter::instance().set_cap(arguments.memory_budget_bytes);
  try {
    const OwnerScope owner(Owner::kWeights);
    ZooModel model = load_pretrained(folder);
    if (can_generate(model.chain)) return model;
  } catch (const OutOfBudget& error) {
    throw BudgetError(fmt::format("--memory_budget does not even hold the weights of {}: {}",
                                  folder, error.what_without_backtrace()));
  }
  throw ConfigError(
      fmt::format("{}: this model does not continue text; give a GPT or a Llama", folder));
}

// What the model reads first: the prompt with what belongs before it. A text that has ended is not
// to be continued, and there is no text without a token.
std::vector<std::int64_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt) {
  const SpecialTokens special = tokenizer.special_tokens();
  std::vector<std::int64_t> tokens = tokenizer.with_special_tokens(tokenizer.encode(prompt));
  const bool has_ended = special.end && special.end != special.begin && !tokens.empty() &&
                         tokens.back() == *special.end;
  if (has_ended) tokens.pop_back();
  if (!tokens.empty()) return tokens;
  return special.begin ? std::vector<std::int64_t>{*special.begin} : tokenizer.encode("\n");
}

GenerateOptions options_of(const Request& request, const TrainingArguments& arguments,
                           const Tokenizer& tokenizer) {
  GenerateOptions options;
  options.num_tokens = request.max_new_tokens;
  options.temperature = request.temperature;
  options.top_k = request.top_k;
  options.seed = static_cast<std::uint64_t>(arguments.seed);
  options.stop_token = tokenizer.special_tokens().end;
  return options;
}

int run(const Request& request, const TrainingArguments& arguments) {
  const std::string folder = saved_model_folder(request.folder, arguments.model_name_or_path);
  const auto tokenizer = tokenizer_for(arguments.tokenizer, folder);
  const ZooModel model = load(folder, arguments);
  if (tokenizer->vocabulary() > model.input.vocabulary) {
    throw ConfigError(fmt::format(
        "the tokenizer has {} tokens, but the model in {} knows {}: give its own by --tokenizer",
        tokenizer->vocabulary(), folder, model.input.vocabulary));
  }
  const GenerateOptions options = options_of(request, arguments, *tokenizer);
  std::vector<std::int64_t> tokens =
      generate(model.chain, prompt_tokens(*tokenizer, request.prompt), options);
  Json numbers = Json::array();
  for (const std::int64_t token : tokens) numbers.push(token);
  if (!tokens.empty() && options.stop_token == tokens.back()) tokens.pop_back();
  const std::string text = tokenizer->decode(tokens);
  if (!arguments.json) {
    fmt::print("{}{}\n", request.prompt, text);
    return 0;
  }
  Json object = Json::object();
  object.set("prompt", request.prompt).set("text", text).set("tokens", numbers);
  object.set("peak_memory_bytes", MemoryMeter::instance().peak_bytes());
  fmt::print("{}\n", object.dump());
  return 0;
}

}  // namespace

Command add_generate_command(CLI::App& app) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  CLI::App* command = app.add_subcommand("generate", "continue a text with a saved language model");
  auto request = std::make_shared<Request>();
  command->add_option("DIR", request->folder, "a folder with a saved model: --model_name_or_path");
  command->add_option("--prompt", request->prompt, "the text to continue");
  command->add_option("--max_new_tokens", request->max_new_tokens, "at most this many tokens")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{1}, kMost));
  command
      ->add_option("--temperature", request->temperature,
                   "how much chance; 0 always takes the likeliest token")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1000.0));
  command->add_option("--top_k", request->top_k, "draw among the k likeliest tokens; 0: among all")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{0}, kMost));
  auto flags = std::make_shared<ArgumentFlags>(
      *command, std::set<std::string>{"model_name_or_path", "tokenizer", "memory_budget", "seed",
                                      "num_threads", "json"});
  return [request, flags] { return run(*request, flags->arguments()); };
}

}  // namespace headroom
