#include "commands.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/data/tokens.h>
#include <headroom/memory/meter.h>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>

namespace headroom {
namespace {

constexpr const char* kFashionMnistFolder = "/usr/share/datasets/fashion-mnist";
constexpr std::int64_t kSyntheticSamples = 4096;

// Nothing for a model that guesses the next token.
std::optional<Masking> masking(const ModelInput& input, std::int64_t mask_token,
                               std::uint64_t seed) {
  return input.num_masked > 0 ? std::optional<Masking>({input.num_masked, mask_token, seed})
                              : std::nullopt;
}

std::unique_ptr<Dataset> synthetic(const ModelInput& input, std::uint64_t seed) {
  if (input.kind == ModelInput::Kind::kTokens) {
    return make_synthetic_tokens(kSyntheticSamples, input.length, input.vocabulary, seed,
                                 masking(input, input.mask_token, seed));
  }
  if (input.kind == ModelInput::Kind::kPairs) {
    return make_synthetic_pairs(kSyntheticSamples, input.channels, input.rows, input.columns,
                                input.length, input.vocabulary, seed);
  }
  return make_synthetic_images(kSyntheticSamples, input.channels, input.rows, input.columns,
                               input.num_classes, seed);
}

void open_images(const std::string& folder, const ModelInput& input, const std::string& model,
                 Task& task) {
  if (input.kind != ModelInput::Kind::kImages) {
    throw ConfigError(
        fmt::format("--model {} reads tokens, but '{}' holds images; give a text file, a .bin of "
                    "tokens or synthetic",
                    model, folder));
  }
  task.train_data = open_idx_images(folder, true, input.num_classes);
  task.eval_data = open_idx_images(folder, false, input.num_classes);
  const auto image = task.train_data->load({0}).inputs.at(0);
  if (image.size(1) != input.channels || image.size(2) != input.rows ||
      image.size(3) != input.columns) {
    throw DataError(
        fmt::format("--model {} reads images of {}x{}x{}, but '{}' holds {}x{}x{}; set channels, "
                    "rows and columns in --model_config",
                    model, input.channels, input.rows, input.columns, folder, image.size(1),
                    image.size(2), image.size(3)));
  }
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The last tenth of the tokens is for evaluation. An epoch is as many random crops as it takes to
// see each token once on average.
void open_tokens(const TrainingArguments& arguments, Task& task) {
  const ModelInput& input = task.model.input;
  if (input.kind != ModelInput::Kind::kTokens) {
    throw DataError(
        fmt::format("--model {} reads images, but '{}' is a file of text or tokens; give an IDX "
                    "folder or synthetic",
                    arguments.model, arguments.dataset));
  }
  Tokens tokens;
  std::int64_t mask_token = input.mask_token;
  if (ends_with(arguments.dataset, ".bin")) {
    tokens = open_token_file(arguments.dataset);
  } else {
    task.tokenizer = arguments.tokenizer.empty() ? make_byte_tokenizer()
                                                 : open_sentencepiece(arguments.tokenizer);
    // The mask must be no token of the text: where the model's is one, it is the first that the
    // tokenizer does not have.
    const bool needs_mask = input.num_masked > 0 && input.mask_token < task.tokenizer->vocabulary();
    const std::int64_t num_needed = task.tokenizer->vocabulary() + (needs_mask ? 1 : 0);
    if (num_needed > input.vocabulary) {
      throw ConfigError(
          fmt::format("the tokenizer has {} tokens{}, but --model {} knows {}; set vocab_size={} "
                      "in --model_config",
                      task.tokenizer->vocabulary(), needs_mask ? " beside the mask" : "",
                      arguments.model, input.vocabulary, num_needed));
    }
    if (needs_mask) mask_token = task.tokenizer->vocabulary();
    tokens = arguments.tokenizer.empty() ? open_text_file(arguments.dataset)
                                         : open_text_file(arguments.dataset, *task.tokenizer);
  }
  const std::int64_t num_train = tokens->size() - tokens->size() / 10;
  const std::int64_t num_crops = std::max<std::int64_t>(1, num_train / input.length);
  const auto seed = static_cast<std::uint64_t>(arguments.order_seed());
  const std::optional<Masking> masked = masking(input, mask_token, seed);
  task.train_data = make_random_crops(part_of(tokens, 0, num_train), input.length, input.vocabulary,
                                      num_crops, seed, masked);
  if (tokens->size() - num_train > input.length) {
    task.eval_data = make_crops_in_order(part_of(tokens, num_train, tokens->size()), input.length,
                                         input.vocabulary, masked);
  }
}

// A tokenizer turns text into tokens: other data has no use for one.
void check_tokenizer(const TrainingArguments& arguments) {
  if (arguments.tokenizer.empty()) return;
  const char* what =
      arguments.dataset == "synthetic" ? "is made up"
      : arguments.dataset == "fashion-mnist" || std::filesystem::is_directory(arguments.dataset)
          ? "holds images"
      : ends_with(arguments.dataset, ".bin") ? "holds tokens already"
                                             : nullptr;
  if (what != nullptr) {
    throw ConfigError(
        fmt::format("--tokenizer is for text files, but --dataset '{}' {}: leave --tokenizer out, "
                    "or give a text file",
                    arguments.dataset, what));
  }
}

void open_data(const TrainingArguments& arguments, Task& task) {
  const ModelInput& input = task.model.input;
  if (arguments.dataset == "synthetic") {
    task.train_data = synthetic(input, static_cast<std::uint64_t>(arguments.seed));
    return;
  }
  if (input.kind == ModelInput::Kind::kPairs) {
    throw ConfigError(
        fmt::format("--model {} reads images with their texts, of which there is no file format "
                    "yet: give --dataset synthetic, or a "
                    "Dataset of your own to headroom::Trainer",
                    arguments.model));
  }
  const std::string path =
      arguments.dataset == "fashion-mnist" ? kFashionMnistFolder : arguments.dataset;
  if (std::filesystem::is_directory(path) || arguments.dataset == "fashion-mnist")
    return open_images(path, input, arguments.model, task);
  if (std::filesystem::is_regular_file(path)) return open_tokens(arguments, task);
  throw DataError(
      fmt::format("--dataset '{}': no such file or folder (known names: fashion-mnist, synthetic)",
                  arguments.dataset));
}

}  // namespace

Task make_task(const TrainingArguments& arguments, std::int64_t num_local_ranks) {
  configure_threads(static_cast<int>(arguments.num_threads), static_cast<int>(num_local_ranks));
  if (arguments.device != "cpu" && !runtime_info().has_cuda) {
    throw ConfigError(
        fmt::format("--device {}: this LibTorch has no CUDA; use --device cpu", arguments.device));
  }
  check_tokenizer(arguments);
  MemoryMeter& meter = MemoryMeter::instance();
  meter.set_cap(arguments.memory_budget_bytes);
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  Task task;
  try {
    const OwnerScope owner(Owner::kWeights);
    task.model = make_model(arguments.model, arguments.model_config);
  } catch (const OutOfBudget& error) {
    throw BudgetError(fmt::format("--memory_budget does not even hold the weights of {}: {}",
                                  arguments.model, error.what_without_backtrace()));
  }
  open_data(arguments, task);
  return task;
}

}  // namespace headroom
