#include <headroom/core/error.h>
#include <headroom/model/adapters.h>
#include "core/name_list.h"
#include "core/name_pattern.h"
#include "model/published_parts.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

namespace headroom {
namespace {

// Those of the chain, and Hugging Face's where the model has them.
std::vector<std::string> names_of(const Chain& chain, const std::string& ours) {
  std::vector<std::string> names = {ours};
  if (const PublishedForm* form = find_published_form(chain)) {
    for (const std::string& theirs : published_names(*form, ours)) names.push_back(theirs);
  }
  return names;
}

bool fits_any(const std::string& pattern, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return fits_pattern(pattern, name) || fits_pattern(pattern + ".*", name);
  });
}

}  // namespace

void freeze(const Chain& chain, const std::vector<std::string>& patterns) {
  const auto parameters = chain.named_parameters();
  std::vector<std::string> stages;
  for (std::size_t i = 0; i < chain.size(); ++i) stages.push_back(chain.stage(i).name());
  std::vector<at::Tensor> frozen;
  for (const std::string& pattern : patterns) {
    const std::size_t before = frozen.size();
    for (const auto& [name, parameter] : parameters) {
      if (fits_any(pattern, names_of(chain, name))) frozen.push_back(parameter);
    }
    if (frozen.size() > before) continue;
    throw ConfigError(fmt::format(
        "no parameter that is trained fits the pattern '{}'; the stages are {}, and '*' stands for "
        "any text",
        pattern, name_list(stages)));
  }
  for (at::Tensor& parameter : frozen) parameter.requires_grad_(false);
  if (chain.parameters().empty())
    throw ConfigError("everything is frozen: there is nothing to train");
}

}  // namespace headroom
