#pragma once

#include <headroom/model/gpt.h>
#include "model/config_file.h"
#include "model/published.h"

namespace headroom {

/// Reads config.json into the config, or writes it. Throws ConfigError.
void exchange(ConfigFile& file, GptConfig& config);
/// The names and shapes of the weights in Hugging Face's model. `file` holds keys of others that
/// config.json keeps.
PublishedForm make_form(const GptConfig& config, ConfigFile file = {});

}  // namespace headroom
