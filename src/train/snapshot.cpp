#include "train/snapshot.h"

#include <headroom/core/error.h>
#include <headroom/core/log.h>
#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include "core/hash.h"
#include "core/input_file.h"
#include "core/output_file.h"
#include "train/position_text.h"
#include "train/snapshot_folder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <sstream>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "weights.bin";
constexpr const char* kOptimizer = "optimizer.pt";
constexpr const char* kPosition = "position.txt";
const std::array<const char*, 3> kFiles = {kWeights, kOptimizer, kPosition};
constexpr std::int64_t kMostPositionBytes = std::int64_t{1} << 30;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw SnapshotError(fmt::format("{}: {}", shown_path(path.string()), what));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Writes one file of a snapshot, and counts and hashes what was written.
class HashedFile {
 public:
  explicit HashedFile(const fs::path& path) : file_(path.string(), throw_as<SnapshotError>) {}

  void write(const void* data, std::size_t num_bytes) {
    file_.write(data, num_bytes);
    hash_.update(data, num_bytes);
    num_bytes_ += static_cast<std::int64_t>(num_bytes);
  }
  void write(std::string_view text) { write(text.data(), text.size()); }
  SnapshotFile finish() {
    file_.commit();
    return {hash_.hex_digest(), num_bytes_};
  }

 private:
  OutputFile file_;
  Sha256 hash_;
  std::int64_t num_bytes_ = 0;
};

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

SnapshotFile write_weights(const fs::path& path, const Chain& chain) {
  const auto tensors = weights_of(chain);
  std::string header = fmt::format("headroom weights 1: {}\n", tensors.size());
  for (const auto& [name, tensor] : tensors) header += header_line(name, tensor) + "\n";
  HashedFile file(path);
  file.write(header);
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor bytes = tensor.detach().cpu().contiguous();
    file.write(bytes.data_ptr(), bytes.nbytes());
  }
  return file.finish();
}

// Checks that the weights are those of this model, and returns where their bytes begin.
std::int64_t check_weights_header(const InputFile& file, const Chain& chain) {
  const auto tensors = weights_of(chain);
  constexpr std::string_view kFirst = "headroom weights 1: ";
  std::string header(kFirst);
  header += fmt::format("{}\n", tensors.size());
  std::int64_t num_bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    header += header_line(name, tensor) + "\n";
    num_bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  const auto header_bytes = static_cast<std::int64_t>(header.size());
  std::string found(static_cast<std::size_t>(std::min(header_bytes, file.size())), '\0');
  file.read_at(0, found.data(), static_cast<std::int64_t>(found.size()));
  if (found.rfind(kFirst, 0) != 0) file.fail("is not readable: it holds no weights");
  if (found != header) {
    std::istringstream lines(found);
    std::string line;
    std::getline(lines, line);  // how many there are; what is missing or too much is told below
    for (const auto& [name, tensor] : tensors) {
      if (!std::getline(lines, line) || line != header_line(name, tensor))
        file.fail(fmt::format("does not hold '{}' with the sizes of this model", name));
    }
    file.fail("holds more tensors than this model has");
  }
  if (file.size() != header_bytes + num_bytes)
    file.fail(fmt::format("has {} bytes, but the weights of this model are {}", file.size(),
                          header_bytes + num_bytes));
  return header_bytes;
}

void read_weights(const InputFile& file, std::int64_t offset, const Chain& chain) {
  const torch::NoGradGuard no_grad;
  for (auto& [name, tensor] : weights_of(chain)) {
    const bool in_place = tensor.is_cpu() && tensor.is_contiguous();
    at::Tensor bytes = in_place ? tensor.detach()
                                : at::empty(tensor.sizes(),
                                            tensor.options().device(at::kCPU).requires_grad(false));
    const auto num_bytes = static_cast<std::int64_t>(bytes.nbytes());
    file.read_at(offset, bytes.data_ptr(), num_bytes);
    offset += num_bytes;
    if (!in_place) tensor.copy_(bytes);
  }
}

// An archive's writer ends the program when it is told that a write failed (it throws from its
// destructor). So it is never told: the error waits until it is done.
SnapshotFile write_optimizer(const fs::path& path, const torch::optim::Optimizer& optimizer) {
  HashedFile file(path);
  std::exception_ptr error;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to([&](const void* data, std::size_t num_bytes) {
    try {
      if (!error) file.write(data, num_bytes);
    } catch (...) {
      error = std::current_exception();
    }
    return num_bytes;
  });
  if (error) std::rethrow_exception(error);
  return file.finish();
}

void read_optimizer(const fs::path& path, torch::optim::Optimizer& optimizer) {
  const OwnerScope owner(Owner::kOptimizer);
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(path.string());
    optimizer.load(archive);  // takes the tensors of the archive for its own
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const Error& error) {
    fail(path, error.what());
  } catch (const c10::Error& error) {
    fail(path, fmt::format("is not readable: {}", first_line(error.what_without_backtrace())));
  } catch (const std::exception& error) {
    fail(path, fmt::format("is not readable: {}", first_line(error.what())));
  }
}

SnapshotFile write_position(const fs::path& path, const TrainingPosition& position) {
  HashedFile file(path);
  file.write(position_text(position));
  return file.finish();
}

// A random state that LibTorch refuses must not be found in the middle of a resume.
void check_random_states(const fs::path& path, const TrainingPosition& position) {
  const RandomStateScope unchanged(RandomState::capture());
  for (std::string bytes : position.random_states) {
    try {
      set_cpu_random_state(
          torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kByte));
    } catch (const std::exception&) {
      fail(path, "holds a random state that this LibTorch cannot continue");
    }
  }
}

TrainingPosition read_position(const fs::path& path) {
  const InputFile file(path.string(), throw_as<SnapshotError>);
  TrainingPosition position =
      parse_position(file.read_all(kMostPositionBytes), shown_path(path.string()));
  check_random_states(path, position);
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

void check_files(const std::string& folder, const SnapshotList& list) {
  for (const char* name : kFiles) check_snapshot_file(folder, list, name);
}

void write_snapshot(const fs::path& folder, std::int64_t sequence, const Chain& chain,
                    const torch::optim::Optimizer& optimizer, const TrainingPosition& position) {
  SnapshotList list;
  list.sequence = sequence;
  list.files[kWeights] = write_weights(folder / kWeights, chain);
  list.files[kOptimizer] = write_optimizer(folder / kOptimizer, optimizer);
  list.files[kPosition] = write_position(folder / kPosition, position);
  write_snapshot_list(folder.string(), list);
}

}  // namespace

std::string save_snapshot(const std::string& output_dir, const Chain& chain,
                          const torch::optim::Optimizer& optimizer,
                          const TrainingPosition& position, std::int64_t total_limit) {
  const std::string folder = snapshot_folder(output_dir, position.global_step);
  const std::string work = snapshot_work_folder(output_dir, position.global_step);
  const std::vector<FoundSnapshot> before = find_snapshots(output_dir);
  const std::int64_t sequence = before.empty() ? 1 : before.back().list.sequence + 1;
  try {
    fs::remove_all(work);
    fs::create_directories(work);
    write_snapshot(work, sequence, chain, optimizer, position);
    replace_snapshot(work, folder);
    sync_folder(output_dir, throw_as<SnapshotError>);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(work, ignored);
    fail(folder, fmt::format("cannot be written: {}", first_line(error.what()).substr(0, 300)));
  }
  // The one that was just written is the last of them, whatever its number.
  std::vector<FoundSnapshot> all = find_snapshots(output_dir);
  const auto num_all = static_cast<std::int64_t>(all.size());
  for (std::int64_t i = 0; total_limit > 0 && i < num_all - total_limit; ++i)
    remove_snapshot(all[static_cast<std::size_t>(i)].folder);
  return folder;
}

TrainingPosition load_snapshot(const std::string& folder_text, const Chain& chain,
                               torch::optim::Optimizer& optimizer,
                               const std::map<std::string, std::string>& settings) {
  const fs::path folder = folder_text;
  check_files(folder_text, read_snapshot_list(folder_text));
  TrainingPosition position = read_position(folder / kPosition);
  check_settings(folder, position.settings, settings);
  const InputFile weights((folder / kWeights).string(), throw_as<SnapshotError>);
  const std::int64_t offset = check_weights_header(weights, chain);  // while nothing is changed
  read_optimizer(folder / kOptimizer, optimizer);
  read_weights(weights, offset, chain);
  return position;
}

TrainingPosition snapshot_position(const std::string& folder,
                                   const std::map<std::string, std::string>& settings) {
  check_snapshot_file(folder, read_snapshot_list(folder), kPosition);
  TrainingPosition position = read_position(fs::path(folder) / kPosition);
  check_settings(folder, position.settings, settings);
  return position;
}

std::string last_snapshot(const std::string& output_dir) {
  const std::vector<FoundSnapshot> all = find_snapshots(output_dir);
  std::string problem;
  const auto skip = [&](const std::string& why) {
    if (problem.empty()) problem = why;
    log_warning(fmt::format("skipping a broken snapshot: {}", why));
  };
  // When one without a list was written is not known: they are all named.
  for (const FoundSnapshot& snapshot : all) {
    if (!snapshot.problem.empty()) skip(snapshot.problem);
  }
  for (auto snapshot = all.rbegin(); snapshot != all.rend(); ++snapshot) {
    if (!snapshot->problem.empty()) continue;
    try {
      check_files(snapshot->folder, snapshot->list);
      return snapshot->folder;
    } catch (const SnapshotError& error) {
      skip(error.what());
    }
  }
  fail(output_dir, all.empty() ? "holds no snapshot to resume from"
                               : fmt::format("holds no whole snapshot: {}", problem));
}

}  // namespace headroom
