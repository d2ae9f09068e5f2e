#include <headroom/model/safetensors.h>

#include <headroom/core/error.h>
#include "core/hashed_file.h"
#include "core/input_file.h"
#include "core/mapped_pages.h"
#include "core/name_list.h"
#include "model/safetensors_header.h"
#include "model/safetensors_writer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <filesystem>
#include <set>
#include <unordered_map>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kPieceBytes = 1 << 20;
constexpr const char* kIndexEnd = ".index.json";

std::vector<SafetensorsEntry> read_entries(const InputFile& file, std::size_t shard) {
  const auto refuse = [&](const std::string& what) {
    throw DataError(fmt::format("'{}' is no safetensors file: {}", file.path(), what));
  };
  if (file.size() < kSafetensorsLengthBytes)
    refuse(fmt::format("it is {} bytes long", file.size()));
  std::array<unsigned char, kSafetensorsLengthBytes> bytes{};
  file.read_at(0, bytes.data(), kSafetensorsLengthBytes);
  std::uint64_t length = 0;
  for (int byte = kSafetensorsLengthBytes - 1; byte >= 0; --byte)
    length = length << 8 | bytes[static_cast<std::size_t>(byte)];
  const std::int64_t rest = file.size() - kSafetensorsLengthBytes;
  if (length > static_cast<std::uint64_t>(rest)) {
    refuse(fmt::format("its header is to be {} bytes, of {} in the file", length, file.size()));
  }
  if (length > static_cast<std::uint64_t>(kMostSafetensorsHeaderBytes))
    refuse(fmt::format("its header of {} bytes is above 100 MB", length));
  const auto header = static_cast<std::int64_t>(length);
  std::string json(length, '\0');
  file.read_at(kSafetensorsLengthBytes, json.data(), header);
  std::vector<SafetensorsEntry> entries =
      parse_safetensors_header(file.path(), json, rest - header);
  for (SafetensorsEntry& entry : entries) {
    entry.begin += kSafetensorsLengthBytes + header;
    entry.shard = shard;
  }
  return entries;
}

bool is_index(const std::string& path) {
  const std::size_t length = std::strlen(kIndexEnd);
  return path.size() >= length && path.compare(path.size() - length, length, kIndexEnd) == 0;
}

std::string file_of(const std::string& path) {
  if (!is_folder(path)) return path;
  const std::string single = (fs::path(path) / "model.safetensors").string();
  if (path_exists(single)) return single;
  if (path_exists(single + kIndexEnd)) return single + kIndexEnd;
  const std::string pickled = (fs::path(path) / "pytorch_model.bin").string();
  throw DataError(fmt::format(
      "'{}' holds no model.safetensors{}", shown_path(path),
      path_exists(pickled) || path_exists(pickled + kIndexEnd)
          ? "; its pytorch_model.bin is a Python program: load it there and save it with "
            "save_pretrained(..., safe_serialization=True)"
          : " and no model.safetensors.index.json"));
}

// A tensor in pieces of about kPieceBytes: all values of one in memory without gaps, else rows.
template <typename Body>
void for_each_piece(const at::Tensor& tensor, const Body& body) {
  if (tensor.numel() == 0) return;
  const at::Tensor rows =
      tensor.is_contiguous() || tensor.dim() == 0 ? tensor.reshape({-1}) : tensor;
  const auto row_bytes = static_cast<std::int64_t>(rows.nbytes()) / rows.size(0);
  const std::int64_t step = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
  for (std::int64_t row = 0; row < rows.size(0); row += step) {
    body(rows.narrow(0, row, std::min(step, rows.size(0) - row)));
    if (rows.is_cpu()) release_mapped_pages(rows.data_ptr());
  }
}

bool is_plain(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.is_contiguous(); }

// Calls body(part of the tensor, its values in the file) for a tensor in pieces.
template <typename Body>
void read_pieces(const InputFile& file, const SafetensorsEntry& entry, const at::Tensor& tensor,
                 const Body& body) {
  // Any byte may be there for a bool, but only 0 and 1 are values of one: they are converted.
  const at::ScalarType type = entry.dtype == at::kBool ? at::kByte : entry.dtype;
  std::vector<char> piece;
  std::int64_t at = entry.begin;
  for_each_piece(tensor, [&](const at::Tensor& part) {
    const std::int64_t num_bytes = part.numel() * static_cast<std::int64_t>(c10::elementSize(type));
    piece.resize(std::max(piece.size(), static_cast<std::size_t>(num_bytes)));
    file.read_at(at, piece.data(), num_bytes);
    body(part, torch::from_blob(piece.data(), part.sizes(), type));
    at += num_bytes;
  });
}

}  // namespace

struct SafetensorsReader::Shards {
  std::string path;
  std::deque<InputFile> files;
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string, std::size_t> by_name;

  void add(const std::string& file) {
    files.emplace_back(file);
    for (SafetensorsEntry& entry : read_entries(files.back(), files.size() - 1)) {
      if (!by_name.emplace(entry.name, entries.size()).second) {
        throw DataError(
            fmt::format("'{}' is in '{}' and in another file of the model", entry.name, file));
      }
      entries.push_back(std::move(entry));
    }
  }

  void add_index(const std::string& index) {
    const auto map = parse_safetensors_index(
        index, read_json_text(index, throw_as<DataError>, kMostSafetensorsHeaderBytes));
    std::set<std::string> names;
    for (const auto& [tensor, name] : map) names.insert(name);
    for (const std::string& name : names) add((fs::path(index).parent_path() / name).string());
    const std::vector<std::string> order(names.begin(), names.end());
    for (const auto& [tensor, name] : map) {
      const auto found = by_name.find(tensor);
      if (found == by_name.end() || order[entries[found->second].shard] != name)
        throw DataError(
            fmt::format("'{}' says that '{}' is in '{}', where it is not", index, tensor, name));
    }
    for (const SafetensorsEntry& entry : entries) {
      if (map.count(entry.name) == 0) {
        throw DataError(fmt::format("'{}' has '{}', which the index '{}' does not know",
                                    files[entry.shard].path(), entry.name, index));
      }
    }
  }
};

SafetensorsReader::SafetensorsReader(const std::string& path)
    : shards_(std::make_unique<Shards>()) {
  shards_->path = path;
  const std::string file = file_of(path);
  if (is_index(file)) {
    shards_->add_index(file);
  } else {
    shards_->add(file);
  }
}
SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&& other) noexcept = default;

const std::vector<SafetensorsEntry>& SafetensorsReader::entries() const { return shards_->entries; }

const SafetensorsEntry* SafetensorsReader::find(const std::string& name) const {
  const auto found = shards_->by_name.find(name);
  return found == shards_->by_name.end() ? nullptr : &shards_->entries[found->second];
}

void SafetensorsReader::check(const SafetensorsEntry& entry, const at::Tensor& into) const {
  const InputFile& file = shards_->files.at(entry.shard);
  if (into.sizes() != at::IntArrayRef(entry.shape)) {
    throw DataError(fmt::format("'{}' in '{}' is ({}), but ({}) is needed", entry.name, file.path(),
                                fmt::join(entry.shape, ", "), fmt::join(into.sizes(), ", ")));
  }
  if (c10::isFloatingType(entry.dtype) != into.is_floating_point()) {
    throw DataError(fmt::format("'{}' in '{}' is {}, but {} is needed", entry.name, file.path(),
                                c10::toString(entry.dtype), c10::toString(into.scalar_type())));
  }
}

void SafetensorsReader::check_all(
    const std::vector<std::pair<std::string, at::Tensor>>& into) const {
  const std::string& path = shards_->path;
  std::vector<std::string> missing, unexpected;
  std::set<std::string> names;
  for (const auto& [name, tensor] : into) {
    names.insert(name);
    if (find(name) == nullptr) missing.push_back(name);
  }
  for (const SafetensorsEntry& entry : entries()) {
    if (names.count(entry.name) == 0) unexpected.push_back(entry.name);
  }
  if (!missing.empty()) throw DataError(fmt::format("'{}' lacks {}", path, name_list(missing)));
  if (!unexpected.empty()) {
    throw DataError(
        fmt::format("'{}' has {}, for which there is no place", path, name_list(unexpected)));
  }
  for (const auto& [name, tensor] : into) check(*find(name), tensor);
}

void SafetensorsReader::read(const SafetensorsEntry& entry, const at::Tensor& into) const {
  check(entry, into);
  const InputFile& file = shards_->files.at(entry.shard);
  const at::Tensor target = into.detach();
  if (is_plain(target) && target.scalar_type() == entry.dtype && entry.dtype != at::kBool)
    return file.read_at(entry.begin, target.data_ptr(), entry.num_bytes);
  read_pieces(file, entry, target, [](const at::Tensor& part, const at::Tensor& piece) {
    at::Tensor(part).copy_(piece);
  });
}

bool SafetensorsReader::equals(const SafetensorsEntry& entry, const at::Tensor& tensor) const {
  if (tensor.sizes() != at::IntArrayRef(entry.shape)) return false;
  bool is_equal = true;
  read_pieces(shards_->files.at(entry.shard), entry, tensor.detach(),
              [&](const at::Tensor& part, const at::Tensor& piece) {
                is_equal = is_equal && at::equal(piece.to(part.scalar_type()), part);
              });
  return is_equal;
}

std::map<std::string, at::Tensor> load_safetensors(const std::string& path) {
  const SafetensorsReader reader(path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : reader.entries()) {
    at::Tensor& tensor = tensors[entry.name];
    tensor = torch::empty(entry.shape, entry.dtype);
    reader.read(entry, tensor);
  }
  return tensors;
}

void load_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& into) {
  const SafetensorsReader reader(path);
  reader.check_all(into);
  for (const auto& [name, tensor] : into) reader.read(*reader.find(name), tensor);
}

void write_safetensors(HashedFile& file,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide values first, so that each tensor is aligned to its own.
  std::vector<std::pair<std::string, at::Tensor>> sorted = tensors;
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  file.write(make_safetensors_header(sorted, metadata));
  std::vector<char> piece;
  for (const auto& [name, tensor] : sorted) {
    for_each_piece(tensor.detach(), [&](const at::Tensor& part) {
      if (is_plain(part)) return file.write(part.data_ptr(), part.nbytes());
      piece.resize(std::max(piece.size(), part.nbytes()));
      at::Tensor copy = torch::from_blob(piece.data(), part.sizes(), part.scalar_type());
      // Turned round, because LibTorch takes memory for blocks of a transposed matrix, and there
      // may be none left under the cap.
      part.dim() == 2 ? copy.t().copy_(part.t()) : copy.copy_(part);
      file.write(piece.data(), part.nbytes());
    });
  }
}

std::string save_safetensors(const std::string& path,
                             const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                             const std::map<std::string, std::string>& metadata) {
  HashedFile file(path);
  write_safetensors(file, tensors, metadata);
  const std::string hash = file.commit().sha256;
  const fs::path folder = fs::path(path).parent_path();
  sync_folder(folder.empty() ? "." : folder.string(), throw_as<ConfigError>);
  return hash;
}

}  // namespace headroom
