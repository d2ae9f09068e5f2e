#include "train/snapshot.h"

#include <headroom/core/error.h>
#include <headroom/memory/meter.h>
#include "core/hash.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "snapshot-";
constexpr const char* kChecksums = "checksums.sha256";
const std::array<const char*, 3> kFiles = {"weights.bin", "optimizer.pt", "position.pt"};

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw SnapshotError(fmt::format("{}: {}", path.string(), what));
}

std::string file_sha256(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, "cannot be read");
  Sha256 hash;
  std::vector<char> piece(1 << 20);
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
    hash.update(piece.data(), static_cast<std::size_t>(file.gcount()));
  }
  return hash.hex_digest();
}

// A rename is only as durable as what it names: the data goes to the disk first.
void sync_path(const fs::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY);
  if (descriptor < 0) return;
  const int result = ::fsync(descriptor);
  ::close(descriptor);
  if (result != 0) fail(path, "cannot be written to the disk");
}

std::int64_t number_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (name.rfind(kPrefix, 0) != 0) return -1;
  const std::string digits = name.substr(std::string(kPrefix).size());
  if (digits.empty() || digits.size() > 18 ||
      digits.find_first_not_of("0123456789") != std::string::npos)
    return -1;
  return std::stoll(digits);
}

std::vector<fs::path> snapshots_in(const std::string& output_dir) {
  std::vector<fs::path> found;
  if (!fs::is_directory(output_dir)) return found;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    if (entry.is_directory() && number_of(entry.path()) >= 0) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end(),
            [](const fs::path& a, const fs::path& b) { return number_of(a) < number_of(b); });
  return found;
}

std::vector<std::pair<std::string, at::Tensor>> weights_of(const Chain& chain) {
  auto tensors = chain.named_parameters();
  for (auto& buffer : chain.named_buffers()) tensors.push_back(std::move(buffer));
  return tensors;
}

// Weights are a header, one line per tensor, and the bytes of the tensors in that order: they can
// be read where they belong, one by one, where an archive would hold all of them a second time.
std::string header_line(const std::string& name, const at::Tensor& tensor) {
  return fmt::format("{} [{}] {}", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ","), name);
}

void write_weights(const fs::path& path, const Chain& chain) {
  const auto tensors = weights_of(chain);
  std::ofstream file(path, std::ios::binary);
  file << "headroom weights 1: " << tensors.size() << "\n";
  for (const auto& [name, tensor] : tensors) file << header_line(name, tensor) << "\n";
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    file.write(static_cast<const char*>(bytes.data_ptr()),
               static_cast<std::streamsize>(bytes.nbytes()));
  }
  file.close();
  if (!file) fail(path, "cannot be written");
}

// Opens the weights for reading after their header, which must be that of this model.
std::ifstream open_weights(const fs::path& path, const Chain& chain) {
  const auto tensors = weights_of(chain);
  std::ifstream file(path, std::ios::binary);
  std::string line;
  if (!std::getline(file, line) || line.rfind("headroom weights 1: ", 0) != 0)
    fail(path, "is not readable: it holds no weights");
  const bool same_count = line == fmt::format("headroom weights 1: {}", tensors.size());
  for (const auto& [name, tensor] : tensors) {
    if (!std::getline(file, line) || line != header_line(name, tensor)) {
      fail(path, fmt::format("does not hold '{}' with the sizes of this model", name));
    }
  }
  if (!same_count) fail(path, "holds more tensors than this model has");
  return file;
}

void read_weights(const fs::path& path, const Chain& chain) {
  std::ifstream file = open_weights(path, chain);
  const torch::NoGradGuard no_grad;
  for (auto& [name, tensor] : weights_of(chain)) {
    const bool in_place = tensor.is_cpu() && tensor.is_contiguous();
    at::Tensor bytes = in_place ? tensor.detach()
                                : at::empty(tensor.sizes(),
                                            tensor.options().device(at::kCPU).requires_grad(false));
    file.read(static_cast<char*>(bytes.data_ptr()), static_cast<std::streamsize>(bytes.nbytes()));
    if (!file) fail(path, fmt::format("ends before '{}'", name));
    if (!in_place) tensor.copy_(bytes);
  }
}

void write_archives(const fs::path& folder, const Chain& chain,
                    const torch::optim::Optimizer& optimizer, const TrainingPosition& position) {
  write_weights(folder / kFiles[0], chain);

  torch::serialize::OutputArchive state;
  optimizer.save(state);
  state.save_to((folder / kFiles[1]).string());

  torch::serialize::OutputArchive place;
  place.write("global_step", c10::IValue(position.global_step));
  place.write("micro_batch", c10::IValue(position.micro_batch));
  std::string splits;
  for (const auto& [key, size] : position.micro_batch_by_shape)
    splits += fmt::format("{} {}\n", key, size);
  place.write("micro_batch_by_shape", c10::IValue(splits));
  place.write("loss_sum", c10::IValue(position.loss_sum));
  place.write("num_skipped_updates", c10::IValue(position.num_skipped_updates));
  place.write("loss_scale", c10::IValue(position.scaler.scale));
  place.write("loss_scale_growth_tracker", c10::IValue(position.scaler.growth_tracker));
  place.write("loss_scale_num_skipped", c10::IValue(position.scaler.num_skipped));
  place.write("num_ranks", c10::IValue(static_cast<std::int64_t>(position.random_states.size())));
  for (std::size_t rank = 0; rank < position.random_states.size(); ++rank) {
    std::string bytes = position.random_states[rank];
    place.write(
        fmt::format("random_state_{}", rank),
        torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kByte)
            .clone(),
        /*is_buffer=*/true);
  }
  std::string settings;
  for (const auto& [key, value] : position.settings) settings += fmt::format("{}={}\n", key, value);
  place.write("settings", c10::IValue(settings));
  place.save_to((folder / kFiles[2]).string());
}

void check_files(const fs::path& folder) {
  if (!fs::is_directory(folder)) fail(folder, "no such snapshot");
  std::ifstream list(folder / kChecksums);
  if (!list) fail(folder, fmt::format("has no {}: the snapshot is not whole", kChecksums));
  std::map<std::string, std::string> expected;
  std::string digest;
  std::string name;
  while (list >> digest >> name) expected[name] = digest;
  for (const char* file : kFiles) {
    const auto found = expected.find(file);
    if (found == expected.end()) fail(folder / kChecksums, fmt::format("does not list {}", file));
    if (file_sha256(folder / file) != found->second)
      fail(folder / file, "is corrupt: its SHA-256 is not the one it was saved with");
  }
}

torch::serialize::InputArchive open_archive(const fs::path& path) {
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(path.string());
  } catch (const c10::Error& error) {
    fail(path, fmt::format("is not readable: {}", error.what_without_backtrace()));
  }
  return archive;
}

std::int64_t read_integer(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

TrainingPosition read_position(const fs::path& folder, torch::serialize::InputArchive& archive) {
  TrainingPosition position;
  try {
    position.global_step = read_integer(archive, "global_step");
    position.micro_batch = read_integer(archive, "micro_batch");
    position.num_skipped_updates = read_integer(archive, "num_skipped_updates");
    c10::IValue value;
    archive.read("micro_batch_by_shape", value);
    std::istringstream splits(value.toStringRef());
    std::string key;
    std::int64_t size = 0;
    while (splits >> key >> size) position.micro_batch_by_shape[key] = size;
    archive.read("loss_sum", value);
    position.loss_sum = value.toDouble();
    archive.read("loss_scale", value);
    position.scaler.scale = value.toDouble();
    position.scaler.growth_tracker = read_integer(archive, "loss_scale_growth_tracker");
    position.scaler.num_skipped = read_integer(archive, "loss_scale_num_skipped");
    position.random_states.resize(static_cast<std::size_t>(read_integer(archive, "num_ranks")));
    for (std::size_t rank = 0; rank < position.random_states.size(); ++rank) {
      at::Tensor state;
      archive.read(fmt::format("random_state_{}", rank), state, /*is_buffer=*/true);
      position.random_states[rank].assign(static_cast<const char*>(state.data_ptr()),
                                          state.nbytes());
    }
    archive.read("settings", value);
    std::istringstream lines(value.toStringRef());
    for (std::string line; std::getline(lines, line);) {
      const std::size_t equals = line.find('=');
      if (equals != std::string::npos)
        position.settings[line.substr(0, equals)] = line.substr(equals + 1);
    }
  } catch (const c10::Error& error) {
    fail(folder / kFiles[2], fmt::format("lacks a field: {}", error.what_without_backtrace()));
  }
  return position;
}

void check_settings(const fs::path& folder, const std::map<std::string, std::string>& saved,
                    const std::map<std::string, std::string>& now) {
  for (const auto& [key, value] : now) {
    const auto found = saved.find(key);
    const std::string before = found == saved.end() ? "(absent)" : found->second;
    if (before != value)
      fail(folder, fmt::format("was made with {} '{}', not '{}': it belongs to another run", key,
                               before, value));
  }
}

}  // namespace

std::string save_snapshot(const std::string& output_dir, const Chain& chain,
                          const torch::optim::Optimizer& optimizer,
                          const TrainingPosition& position, std::int64_t total_limit) {
  const fs::path folder = fs::path(output_dir) / fmt::format("{}{}", kPrefix, position.global_step);
  const fs::path temporary =
      fs::path(output_dir) / fmt::format(".{}{}.tmp", kPrefix, position.global_step);
  try {
    fs::remove_all(temporary);
    fs::create_directories(temporary);
    write_archives(temporary, chain, optimizer, position);
    std::ofstream list(temporary / kChecksums);
    for (const char* file : kFiles) {
      sync_path(temporary / file);
      list << file_sha256(temporary / file) << "  " << file << "\n";
    }
    list.close();
    if (!list) fail(temporary / kChecksums, "cannot be written");
    sync_path(temporary / kChecksums);
    fs::remove_all(folder);
    fs::rename(temporary, folder);
    sync_path(output_dir);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    fail(folder, fmt::format("cannot be written: {}", std::string(error.what()).substr(0, 200)));
  }
  std::vector<fs::path> all = snapshots_in(output_dir);
  while (total_limit > 0 && static_cast<std::int64_t>(all.size()) > total_limit) {
    fs::remove_all(all.front());
    all.erase(all.begin());
  }
  return folder.string();
}

TrainingPosition load_snapshot(const std::string& folder_text, const Chain& chain,
                               torch::optim::Optimizer& optimizer,
                               const std::map<std::string, std::string>& settings) {
  const fs::path folder = folder_text;
  check_files(folder);
  auto place = open_archive(folder / kFiles[2]);
  TrainingPosition position = read_position(folder, place);
  check_settings(folder, position.settings, settings);

  open_weights(folder / kFiles[0], chain);  // throws while nothing is changed
  {
    const OwnerScope owner(Owner::kOptimizer);
    auto state = open_archive(folder / kFiles[1]);
    optimizer.load(state);  // takes the tensors of the archive for its own
  }
  read_weights(folder / kFiles[0], chain);
  return position;
}

TrainingPosition snapshot_position(const std::string& folder,
                                   const std::map<std::string, std::string>& settings) {
  check_files(folder);
  auto place = open_archive(fs::path(folder) / kFiles[2]);
  TrainingPosition position = read_position(folder, place);
  check_settings(folder, position.settings, settings);
  return position;
}

std::string last_snapshot(const std::string& output_dir) {
  const auto all = snapshots_in(output_dir);
  if (all.empty()) fail(output_dir, "holds no snapshot to resume from");
  return all.back().string();
}

}  // namespace headroom
