// Chains as numbers.
#include "fuzz/fuzz_files.h"

#include <headroom/config/chain_costs.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  allow_errors([&] { parse_chain_text(text_of(data, size)); });
  return 0;
}
