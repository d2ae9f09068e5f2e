// Files of tokens and of text.
#include "fuzz/fuzz_files.h"

#include <headroom/data/tokens.h>

#include <algorithm>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  static const FuzzFolder folder;
  const std::string path = folder.write("tokens.bin", text_of(data, size));
  allow_errors([&] {
    const Tokens tokens = open_token_file(path);
    std::vector<std::int64_t> values(static_cast<std::size_t>(tokens->size()));
    tokens->read(0, tokens->size(), values.data());
    const auto crops = make_random_crops(tokens, 4, 300, 2, 1);
    crops->load({0, 1});
  });
  allow_errors([&] { make_crops_in_order(open_text_file(path), 4, 256)->load({0}); });
  return 0;
}
