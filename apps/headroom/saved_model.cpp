#include "saved_model.h"

#include <headroom/core/error.h>
#include "core/figures.h"

#include <fmt/format.h>

namespace headroom {

std::string saved_model_folder(const std::string& by_position, const std::string& by_flag) {
  if (by_position.empty() && by_flag.empty()) {
    throw ConfigError(
        "give the folder of a saved model: the --output_dir of a run, or a Hugging Face folder");
  }
  if (!by_position.empty() && !by_flag.empty() && by_position != by_flag) {
    throw ConfigError(
        fmt::format("two folders of models: '{}' and --model_name_or_path '{}'; give "
                    "one",
                    by_position, by_flag));
  }
  return by_position.empty() ? by_flag : by_position;
}

std::shared_ptr<const Tokenizer> tokenizer_for(const std::string& path,
                                               const std::string& model_folder) {
  if (!path.empty()) return open_tokenizer(path);
  if (!model_folder.empty() && has_tokenizer(model_folder)) return open_tokenizer(model_folder);
  return make_byte_tokenizer();
}

std::string evaluation_text(const EvalResults& eval) {
  std::string text = "loss " + format_loss(eval.loss);
  if (eval.accuracy) text += fmt::format(", accuracy {:.2f}%", 100 * *eval.accuracy);
  if (eval.f1) text += fmt::format(", F1 {:.2f}%", 100 * *eval.f1);
  if (eval.perplexity) text += fmt::format(", perplexity {}", format_figure(*eval.perplexity));
  return text;
}

}  // namespace headroom
