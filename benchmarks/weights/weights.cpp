// What it takes to save and to load a model: time against reading and writing the same bytes, and
// memory against the weights.
//
//   weights_benchmark save|load MODEL FOLDER [rounds]
//
// `save` makes a model of the zoo and saves it; `load`, in a process of its own (the peak of a
// process never goes down), reads it. Rounds interleave loading with reading the file alone, each
// time from the disk: the system is told to forget the file.

#include <headroom/memory/meter.h>
#include <headroom/model/pretrained.h>
#include <headroom/model/zoo.h>

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "timing.h"

namespace {

using namespace headroom;
using headroom::benchmark::median;
using headroom::benchmark::now;

constexpr double kMebi = 1 << 20;

// Opens a file, forgets what memory holds of it, and closes it after `body(descriptor)`.
template <typename Body>
void with_file(const std::string& path, const Body& body) {
  const int file = ::open(path.c_str(), O_RDONLY);
  if (file < 0) throw std::runtime_error("cannot open " + path);
  ::fdatasync(file);
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  body(file);
  ::close(file);
}

double seconds_to_read(const std::string& path) {
  double seconds = 0;
  with_file(path, [&](int file) {
    std::vector<char> piece(8 << 20);
    const double begin = now();
    while (::read(file, piece.data(), piece.size()) > 0) {
    }
    seconds = now() - begin;
  });
  return seconds;
}

void save(const std::string& name, const std::string& folder) {
  const ZooModel model = make_model(name, "");
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t live = meter.live_bytes(), resident = peak_resident_bytes();
  meter.reset_peak();
  const double begin = now();
  save_pretrained(model.chain, folder);
  fmt::print(
      "saved {} of {:.0f} MiB in {:.2f} s; beside it {:.2f} MiB of tensors, {:.1f} resident\n",
      name, static_cast<double>(live) / kMebi, now() - begin,
      static_cast<double>(meter.peak_bytes() - live) / kMebi,
      static_cast<double>(peak_resident_bytes() - resident) / kMebi);
}

void load(const std::string& folder, int rounds) {
  const std::string path = folder + "/model.safetensors";
  const double file_bytes = static_cast<double>(std::filesystem::file_size(path));
  MemoryMeter& meter = MemoryMeter::instance();
  std::vector<double> loading, reading, ratios;
  for (int round = 0; round < rounds; ++round) {
    reading.push_back(seconds_to_read(path));
    with_file(path, [](int) {});
    const std::int64_t resident = resident_bytes(), live = meter.live_bytes();
    meter.reset_peak();
    const double begin = now();
    const ZooModel model = load_pretrained(folder);
    loading.push_back(now() - begin);
    ratios.push_back(loading.back() / reading.back());
    const auto weights = static_cast<double>(meter.live_bytes() - live);
    if (round > 0) continue;
    fmt::print(
        "weights {:.0f} MiB, file {:.0f} MiB; loading took {:.4f}x the weights of tensors, "
        "{:.4f}x resident\n",
        weights / kMebi, file_bytes / kMebi,
        static_cast<double>(meter.peak_bytes() - live) / weights,
        static_cast<double>(peak_resident_bytes() - resident) / weights);
  }
  fmt::print(
      "from the disk: loading {:.2f} s, reading the file alone {:.2f} s ({:.0f} MiB/s): "
      "{:.2f}x (median of neighbours)\n",
      median(loading), median(reading), file_bytes / kMebi / median(reading), median(ratios));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 3 ? argv[1] : "";
  MemoryMeter::instance();  // counts from the first tensor on
  if (what == "save") {
    save(argv[2], argv[3]);
  } else if (what == "load") {
    load(argv[3], argc > 4 ? std::atoi(argv[4]) : 3);
  } else {
    fmt::print(stderr, "weights_benchmark save|load MODEL FOLDER [rounds]\n");
    return 2;
  }
  return 0;
}
