// IDX files, plain and gzip. The first byte says which file of a dataset the others are.
#include "fuzz/fuzz_files.h"
#include "support/idx_files.h"

#include <headroom/data/dataset.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  static const std::string kWhole[] = {idx_labels(3), idx_images(3, 4, 4)};
  static const char* const kNames[] = {kTrainLabels, kTrainImages};
  static const FuzzFolder folder;
  if (size == 0) return 0;
  const std::size_t which = data[0] & 1;
  folder.write(kNames[which], text_of(data + 1, size - 1));
  folder.write(kNames[1 - which], kWhole[1 - which]);
  allow_errors([] {
    const auto images = open_idx_images(folder.path(), true, 10);
    images->load({0, images->size() - 1});
  });
  return 0;
}
