#pragma once

#include <headroom/data/tokenizer.h>
#include <headroom/report/results.h>

#include <memory>
#include <string>

namespace headroom {

/// The folder of a saved model, by position or by flag: one of the two must be given. Throws
/// ConfigError.
std::string saved_model_folder(const std::string& by_position, const std::string& by_flag);

/// The tokenizer that --tokenizer names, or else that of the model's folder, or else bytes. Either
/// may be empty.
std::shared_ptr<const Tokenizer> tokenizer_for(const std::string& path,
                                               const std::string& model_folder);

/// "loss 1.2345, accuracy 67.89%, F1 65.43%" or "loss 1.2345, perplexity 3.44": what there is.
std::string evaluation_text(const EvalResults& eval);

}  // namespace headroom
