// IDX files, plain and gzip. The first byte says which file of a dataset the others are.
#include "fuzz/fuzz_files.h"
#include "support/idx_files.h"

#include <headroom/data/dataset.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  static const FuzzFolder folder;
  if (size == 0) return 0;
  const bool is_images = (data[0] & 1) != 0;
  folder.write(kTrainImages, idx_images(3, 4, 4));
  folder.write(kTrainLabels, idx_labels(3));
  folder.write(is_images ? kTrainImages : kTrainLabels, text_of(data + 1, size - 1));
  allow_errors([] {
    const auto images = open_idx_images(folder.path(), true, 10);
    images->load({0, images->size() - 1});
  });
  return 0;
}
