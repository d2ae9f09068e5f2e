#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include "core/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <torch/types.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>
#include <vector>

namespace headroom {
namespace {

struct IdxFile {
  std::string path;
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> bytes;  // what follows the header
};

[[noreturn]] void fail(const std::string& path, std::int64_t offset,
                       const std::string& expectation) {
  throw DataError(fmt::format("{}: at byte {}: {}", shown_path(path), offset, expectation));
}

// zlib reads plain files through the same calls as gzip ones.
class GzReader {
 public:
  explicit GzReader(const std::string& path) : path_(path), stored_(path) {
    const int descriptor = ::fcntl(stored_.descriptor(), F_DUPFD_CLOEXEC, 0);
    file_ = descriptor < 0 ? nullptr : gzdopen(descriptor, "rb");  // which owns it from here on
    if (file_ == nullptr) stored_.fail("cannot be opened");
    gzbuffer(file_, 1 << 17);  // of compressed bytes
  }
  ~GzReader() { gzclose(file_); }
  GzReader(const GzReader&) = delete;
  GzReader& operator=(const GzReader&) = delete;

  void read_exactly(void* to, std::int64_t num_bytes, const char* what) {
    read_exactly(to, num_bytes, num_bytes, what);
  }

  // The first `num_bytes` of `needed_bytes`.
  void read_exactly(void* to, std::int64_t num_bytes, std::int64_t needed_bytes, const char* what) {
    auto* out = static_cast<char*>(to);
    std::int64_t done = 0;
    while (done < num_bytes) {
      const auto piece = static_cast<unsigned>(std::min<std::int64_t>(num_bytes - done, 1 << 24));
      const int got = gzread(file_, out + done, piece);
      if (got < 0)
        fail(path_, offset_ + done,
             fmt::format("the compressed data is corrupt while reading {}", what));
      if (got == 0)
        fail(path_, offset_ + done,
             fmt::format("the file ends, but {} need {} more bytes", what, needed_bytes - done));
      done += got;
    }
    offset_ += num_bytes;
  }

  void expect_end() {
    char extra = 0;
    const int got = gzread(file_, &extra, 1);
    if (got > 0) fail(path_, offset_, "the data goes on, but the header announces no more");
    if (got < 0 || !ends_with_its_length())
      fail(path_, offset_, "the compressed data is corrupt or cut at its end");
  }

 private:
  // A gzip file ends with its checksum and, modulo 2^32, the number of bytes that it holds. zlib
  // checks both where they are there, and does not mind where they are cut off. A file of several
  // parts, each with an end of its own, is refused as well: data sets are not packed so.
  bool ends_with_its_length() const {
    if (gzdirect(file_) != 0) return true;  // it is not compressed
    std::array<std::uint8_t, 4> end{};
    stored_.read_at(stored_.size() - 4, end.data(), 4);
    const std::uint32_t length = end[0] | (std::uint32_t{end[1]} << 8) |
                                 (std::uint32_t{end[2]} << 16) | (std::uint32_t{end[3]} << 24);
    return length == static_cast<std::uint32_t>(offset_);
  }

  std::string path_;
  InputFile stored_;
  gzFile file_ = nullptr;
  std::int64_t offset_ = 0;
};

std::int64_t big_endian(const std::uint8_t* bytes) {
  return (std::int64_t{bytes[0]} << 24) | (std::int64_t{bytes[1]} << 16) |
         (std::int64_t{bytes[2]} << 8) | std::int64_t{bytes[3]};
}

IdxFile read_idx(const std::string& path, int num_dimensions) {
  constexpr std::uint8_t kUnsignedByte = 0x08;
  constexpr std::int64_t kMostImageBytes = std::int64_t{1} << 36;
  GzReader reader(path);
  IdxFile file;
  file.path = path;
  std::array<std::uint8_t, 4> magic{};
  reader.read_exactly(magic.data(), 4, "the magic number");
  if (magic[0] != 0 || magic[1] != 0 || magic[2] != kUnsignedByte || magic[3] != num_dimensions) {
    fail(path, 0,
         fmt::format("expected the magic number 0000080{} of an IDX file of bytes, found "
                     "{:02x}{:02x}{:02x}{:02x}",
                     num_dimensions, magic[0], magic[1], magic[2], magic[3]));
  }
  std::int64_t num_bytes = 1;
  for (int i = 0; i < num_dimensions; ++i) {
    std::array<std::uint8_t, 4> size{};
    reader.read_exactly(size.data(), 4, "the sizes");
    file.shape.push_back(big_endian(size.data()));
    if (file.shape.back() == 0) fail(path, 4 + 4 * i, "a size is 0: the file holds no data");
    if (file.shape.back() > kMostImageBytes / num_bytes)
      fail(path, 4 + 4 * i, "the sizes announce more than 64 GiB");
    num_bytes *= file.shape.back();
  }
  // In growing pieces: a corrupt header may announce more than there is memory, and the file itself
  // says so first.
  constexpr std::int64_t kFirstPiece = 1 << 16, kLargestPiece = 1 << 26;
  file.bytes.reserve(static_cast<std::size_t>(std::min(num_bytes, kLargestPiece)));
  for (std::int64_t done = 0; done < num_bytes;) {
    const std::int64_t piece =
        std::min(num_bytes - done, std::clamp(done, kFirstPiece, kLargestPiece));
    file.bytes.resize(static_cast<std::size_t>(done + piece));
    reader.read_exactly(file.bytes.data() + done, piece, num_bytes - done, "the values");
    done += piece;
  }
  reader.expect_end();
  return file;
}

std::string find_file(const std::string& folder, const std::string& name) {
  if (!is_folder(folder)) throw DataError(fmt::format("{}: no such folder", shown_path(folder)));
  for (const char* ending : {"", ".gz"}) {
    const std::string path = (std::filesystem::path(folder) / (name + ending)).string();
    if (path_exists(path)) return path;
  }
  throw DataError(fmt::format("{}: holds neither {} nor {}.gz", shown_path(folder), name, name));
}

class IdxImages final : public Dataset {
 public:
  IdxImages(IdxFile images, IdxFile labels, std::int64_t num_classes)
      : images_(std::move(images)), labels_(std::move(labels)) {
    if (images_.shape[0] != labels_.shape[0]) {
      throw DataError(fmt::format("{} holds {} images, but {} holds {} labels", images_.path,
                                  images_.shape[0], labels_.path, labels_.shape[0]));
    }
    const auto wrong = std::find_if(labels_.bytes.begin(), labels_.bytes.end(),
                                    [&](std::uint8_t label) { return label >= num_classes; });
    if (wrong != labels_.bytes.end()) {
      constexpr std::int64_t kHeaderBytes = 8;
      fail(labels_.path, kHeaderBytes + (wrong - labels_.bytes.begin()),
           fmt::format("found the label {}, but the classes are 0 to {}", *wrong, num_classes - 1));
    }
    for (std::size_t value = 0; value < scaled_.size(); ++value)
      scaled_[value] = static_cast<float>(value) / 255.0f;
  }

  std::int64_t size() const override { return images_.shape[0]; }

  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    const std::int64_t pixels = images_.shape[1] * images_.shape[2];
    const at::Tensor images = at::empty({count, 1, images_.shape[1], images_.shape[2]}, at::kFloat);
    const at::Tensor labels = at::empty({count}, at::kLong);
    auto* out = images.data_ptr<float>();
    auto* label_out = labels.data_ptr<std::int64_t>();
    for (const std::int64_t index : indices) {
      const std::uint8_t* in = images_.bytes.data() + index * pixels;
      for (std::int64_t i = 0; i < pixels; ++i) *out++ = scaled_[in[i]];
      *label_out++ = labels_.bytes[static_cast<std::size_t>(index)];
    }
    return {{images}, {labels}, count, count};
  }

 private:
  IdxFile images_;
  IdxFile labels_;
  std::array<float, 256> scaled_{};
};

}  // namespace

std::unique_ptr<Dataset> open_idx_images(const std::string& folder, bool train,
                                         std::int64_t num_classes) {
  const std::string prefix = train ? "train" : "t10k";
  IdxFile images = read_idx(find_file(folder, prefix + "-images-idx3-ubyte"), 3);
  IdxFile labels = read_idx(find_file(folder, prefix + "-labels-idx1-ubyte"), 1);
  return std::make_unique<IdxImages>(std::move(images), std::move(labels), num_classes);
}

}  // namespace headroom
