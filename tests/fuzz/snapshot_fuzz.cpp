// The texts of a snapshot: the list of its files, and the position. What was read is written again
// as it was.
#include "fuzz/fuzz_files.h"
#include "train/position_text.h"
#include "train/snapshot_folder.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  const std::string_view text = text_of(data, size);
  allow_errors([&] {
    if (snapshot_list_text(parse_snapshot_list(text, "list")) != text) std::abort();
  });
  allow_errors([&] {
    const std::string once = position_text(parse_position(text, "position"));
    if (position_text(parse_position(once, "position")) != once) std::abort();
  });
  return 0;
}
