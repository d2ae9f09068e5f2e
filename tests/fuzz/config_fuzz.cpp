// Configuration files.
#include "fuzz/fuzz_files.h"

#include <headroom/config/training_arguments.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  static const FuzzFolder folder;
  const std::string path = folder.write("config.json", text_of(data, size));
  allow_errors([&] {
    TrainingArguments arguments;
    const std::vector<std::string> keys = apply_config_file(arguments, path, {});
    validate(arguments, {keys.begin(), keys.end()});
  });
  return 0;
}
