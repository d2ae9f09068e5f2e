// Any bytes as a safetensors file. What loads has no more bytes than the file, and saves and loads
// again.
#include "fuzz/fuzz_files.h"

#include <headroom/model/safetensors.h>

#include <cstdlib>
#include <utility>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  static const FuzzFolder folder;
  folder.write("in.safetensors", text_of(data, size));
  allow_errors([&] {
    const auto tensors = load_safetensors(folder.path() + "/in.safetensors");
    std::size_t num_bytes = 0;
    for (const auto& [name, tensor] : tensors) num_bytes += tensor.nbytes();
    if (num_bytes > size) std::abort();
    const std::string again = folder.path() + "/again.safetensors";
    save_safetensors(again, {tensors.begin(), tensors.end()});
    if (load_safetensors(again).size() != tensors.size()) std::abort();
  });
  return 0;
}
