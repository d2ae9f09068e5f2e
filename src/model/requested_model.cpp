#include "model/requested_model.h"

#include <headroom/model/adapters.h>

#include <filesystem>
#include <sstream>
#include <utility>

namespace headroom {
namespace {

// "a,b"
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

ZooModel with_trained_parameters(ZooModel model, const TrainingArguments& arguments) {
  choose_trained_parameters(model.chain, arguments);
  return model;
}

}  // namespace

ZooModel make_requested_model(const TrainingArguments& arguments) {
  return with_trained_parameters(arguments.model_name_or_path.empty()
                                     ? make_model(arguments.model, arguments.model_config)
                                     : make_model_of(arguments.model_name_or_path),
                                 arguments);
}

ZooModel load_requested_model(const TrainingArguments& arguments) {
  return with_trained_parameters(arguments.model_name_or_path.empty()
                                     ? make_model(arguments.model, arguments.model_config)
                                     : load_pretrained(arguments.model_name_or_path),
                                 arguments);
}

void choose_trained_parameters(Chain& chain, const TrainingArguments& arguments) {
  if (arguments.lora_r > 0) {
    LoraConfig config;
    config.r = arguments.lora_r;
    config.alpha = arguments.lora_alpha;
    config.dropout = arguments.lora_dropout;
    config.target_modules = words_of(arguments.lora_target_modules);
    const std::string& base = arguments.model_name_or_path;
    add_adapters(chain, config,
                 base.empty() ? base : std::filesystem::absolute(base).lexically_normal().string());
  }
  if (!arguments.freeze.empty()) freeze(chain, words_of(arguments.freeze));
}

}  // namespace headroom
