#include "train/snapshot.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include <headroom/model/safetensors.h>
#include "core/hashed_file.h"
#include "core/input_file.h"
#include "core/log.h"
#include "model/safetensors_writer.h"
#include "model/trained_weights.h"
#include "train/position_text.h"
#include "train/snapshot_folder.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kConfig = "config.json";  // where the weights are a model of their own
constexpr const char* kOptimizer = "optimizer.pt";
constexpr const char* kPosition = "position.txt";
const std::array<const char*, 3> kFiles = {kWeights, kOptimizer, kPosition};
constexpr std::int64_t kMostPositionBytes = std::int64_t{1} << 30;

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw SnapshotError(fmt::format("{}: {}", shown_path(path.string()), what));
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

HashedFile new_file(const fs::path& path) {
  return HashedFile(path.string(), throw_as<SnapshotError>);
}

FileDigest write_text(const fs::path& path, const std::string& text) {
  HashedFile file = new_file(path);
  file.write(text);
  return file.commit();
}

FileDigest write_weights(const fs::path& path, const TrainedWeights& weights) {
  HashedFile file = new_file(path);
  write_safetensors(file, weights.tensors);
  return file.commit();
}

// The weights of a snapshot, which are known to be those of this model before anything is changed.
class SavedWeights {
 public:
  SavedWeights(const fs::path& path, const Chain& chain)
      : tensors_(trained_weights(chain).tensors) {
    as_snapshot_error([&] {
      reader_.emplace(path.string());
      reader_->check_all(tensors_);
    });
    // Converted values would not be those of the run.
    for (const auto& [name, tensor] : tensors_) {
      const at::ScalarType saved = reader_->find(name)->dtype;
      if (saved != tensor.scalar_type())
        fail(path, fmt::format("holds '{}' as {}, not as {}", name, c10::toString(saved),
                               c10::toString(tensor.scalar_type())));
    }
  }

  void read() const {
    const torch::NoGradGuard no_grad;
    as_snapshot_error([&] {
      for (const auto& [name, tensor] : tensors_) reader_->read(*reader_->find(name), tensor);
    });
  }

 private:
  template <typename Body>
  static void as_snapshot_error(const Body& body) {
    try {
      body();
    } catch (const DataError& error) {
      throw SnapshotError(error.what());
    }
  }

  std::vector<std::pair<std::string, at::Tensor>> tensors_;
  std::optional<SafetensorsReader> reader_;
};

// An archive's writer ends the program when it is told that a write failed (it throws from its
// destructor). So it is never told: the error waits until it is done.
FileDigest write_optimizer(const fs::path& path, const torch::optim::Optimizer& optimizer) {
  HashedFile file = new_file(path);
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
  return file.commit();
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
  if (list.files.count(kConfig) != 0) check_snapshot_file(folder, list, kConfig);
}

void write_snapshot(const fs::path& folder, std::int64_t sequence, const Chain& chain,
                    const torch::optim::Optimizer& optimizer, const TrainingPosition& position) {
  SnapshotList list;
  list.sequence = sequence;
  const TrainedWeights weights = trained_weights(chain);
  list.files[kWeights] = write_weights(folder / kWeights, weights);
  if (!weights.config.empty()) list.files[kConfig] = write_text(folder / kConfig, weights.config);
  list.files[kOptimizer] = write_optimizer(folder / kOptimizer, optimizer);
  list.files[kPosition] = write_text(folder / kPosition, position_text(position));
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
  const SavedWeights weights(folder / kWeights, chain);
  read_optimizer(folder / kOptimizer, optimizer);
  weights.read();
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
