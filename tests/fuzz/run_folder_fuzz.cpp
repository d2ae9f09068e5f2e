// What `report` reads of a run. The first byte says which of the four files the others are; those
// that are not there yet are taken from the corpus as it goes by.
#include "fuzz/fuzz_files.h"
#include "report/html_page.h"
#include "report/run_record.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace headroom;
  using namespace headroom::testing;
  static const FuzzFolder folder;
  static const char* const kNames[] = {"train_results.json", "plan.json", "metrics.jsonl",
                                       "training_args.json"};
  static std::string whole[4];
  if (size == 0) return 0;
  const std::size_t which = data[0] & 3;
  const std::string_view text = text_of(data + 1, size - 1);
  if (whole[which].empty()) whole[which] = text;
  folder.write(kNames[which], text);
  allow_errors([] { to_html(read_run(folder.path())); });
  folder.write(kNames[which], whole[which]);
  return 0;
}
