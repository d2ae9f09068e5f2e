#include "train/snapshot_folder.h"

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/log.h"
#include "core/output_file.h"
#include "core/text.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <tuple>
#include <utility>

namespace headroom {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFirstLine = "headroom snapshot 3";  // the format's version
constexpr const char* kPrefix = "snapshot-";
constexpr const char* kList = "checksums.sha256";
constexpr const char* kWork = ".tmp";
constexpr const char* kAside = ".aside";
constexpr std::int64_t kMostListBytes = 1 << 20;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw SnapshotError(fmt::format("{}: {}", shown_path(path), what));
}

std::string sha256_of(std::string_view text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex_digest();
}

std::optional<std::int64_t> whole_number(std::string_view digits) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || stop != digits.data() + digits.size() || value < 0)
    return std::nullopt;
  return value;
}

// The N of a folder named snapshot-N.
std::optional<std::int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (name.rfind(kPrefix, 0) != 0) return std::nullopt;
  return whole_number(std::string_view(name).substr(std::strlen(kPrefix)));
}

std::vector<fs::path> folders_in(const std::string& output_dir) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(output_dir, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_directory(ignored)) found.push_back(entry->path());
  }
  return found;
}

void warn_about(const fs::path& folder, const std::error_code& error) {
  log_warning(
      fmt::format("{} cannot be removed: {}", shown_path(folder.string()), error.message()));
}

// A folder that is no snapshot any more.
void remove_stale(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) warn_about(folder, error);
}

std::string list_body(const SnapshotList& list) {
  std::string text = fmt::format("{}\nsequence {}\n", kFirstLine, list.sequence);
  for (const auto& [name, file] : list.files)
    text += fmt::format("{}  {}  {}\n", file.sha256, file.num_bytes, name);
  return text;
}

}  // namespace

std::string snapshot_list_text(const SnapshotList& list) {
  const std::string body = list_body(list);
  return body + sha256_of(body) + "  of the lines above\n";
}

SnapshotList parse_snapshot_list(std::string_view text, const std::string& where) {
  SnapshotList list;
  std::string_view rest = text;
  const auto next_line = [&] {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return line;
  };
  if (next_line() != kFirstLine)
    fail(where,
         fmt::format("does not start with '{}': it is damaged or of another version", kFirstLine));
  constexpr std::string_view kSequence = "sequence ";
  const std::string_view sequence = next_line();
  const auto number = sequence.substr(0, kSequence.size()) == kSequence
                          ? whole_number(sequence.substr(kSequence.size()))
                          : std::nullopt;
  list.sequence = number.value_or(0);
  constexpr std::size_t kDigestSize = 64;
  while (!rest.empty()) {
    const std::string_view line = next_line();
    if (line.size() <= kDigestSize + 2 || rest.empty()) continue;
    const std::string_view size_and_name = line.substr(kDigestSize + 2);
    const std::size_t gap = std::min(size_and_name.find("  "), size_and_name.size());
    FileDigest& file =
        list.files[std::string(size_and_name.substr(std::min(gap + 2, size_and_name.size())))];
    file.sha256 = line.substr(0, kDigestSize);
    file.num_bytes = whole_number(size_and_name.substr(0, gap)).value_or(0);
  }
  // The lines must be those that this list is written as, to the letter: a flipped bit anywhere
  // makes another text.
  if (text != snapshot_list_text(list)) fail(where, "is corrupt");
  return list;
}

std::string snapshot_folder(const std::string& output_dir, std::int64_t step) {
  return (fs::path(output_dir) / fmt::format("{}{}", kPrefix, step)).string();
}

std::string snapshot_work_folder(const std::string& output_dir, std::int64_t step) {
  return (fs::path(output_dir) / fmt::format(".{}{}{}", kPrefix, step, kWork)).string();
}

SnapshotList read_snapshot_list(const std::string& folder) {
  if (!is_folder(folder)) fail(folder, "no such snapshot");
  const std::string path = (fs::path(folder) / kList).string();
  if (!path_exists(path)) fail(folder, fmt::format("has no {}: the snapshot is not whole", kList));
  return parse_snapshot_list(InputFile(path, throw_as<SnapshotError>).read_all(kMostListBytes),
                             path);
}

void write_snapshot_list(const std::string& folder, const SnapshotList& list) {
  OutputFile file((fs::path(folder) / kList).string(), throw_as<SnapshotError>);
  file.write(snapshot_list_text(list));
  file.commit();
  sync_folder(folder, throw_as<SnapshotError>);
}

void check_snapshot_file(const std::string& folder, const SnapshotList& list,
                         const std::string& name) {
  const std::string path = (fs::path(folder) / name).string();
  const auto found = list.files.find(name);
  if (found == list.files.end()) fail(folder, fmt::format("does not list {}", name));
  const InputFile file(path, throw_as<SnapshotError>);
  if (file.size() != found->second.num_bytes)
    file.fail(fmt::format("is corrupt: it has {} bytes, not the {} it was saved with", file.size(),
                          found->second.num_bytes));
  Sha256 hash;
  std::vector<char> piece(1 << 20);
  for (std::int64_t done = 0; done < file.size();) {
    const std::int64_t count =
        std::min(file.size() - done, static_cast<std::int64_t>(piece.size()));
    file.read_at(done, piece.data(), count);
    hash.update(piece.data(), static_cast<std::size_t>(count));
    done += count;
  }
  if (hash.hex_digest() != found->second.sha256)
    file.fail("is corrupt: its SHA-256 is not the one it was saved with");
}

std::vector<FoundSnapshot> find_snapshots(const std::string& output_dir) {
  std::vector<FoundSnapshot> found;
  for (const fs::path& folder : folders_in(output_dir)) {
    if (!step_of(folder)) continue;
    FoundSnapshot snapshot;
    snapshot.folder = folder.string();
    try {
      snapshot.list = read_snapshot_list(snapshot.folder);
    } catch (const SnapshotError& error) {
      snapshot.problem = error.what();
    }
    found.push_back(std::move(snapshot));
  }
  const auto key = [](const FoundSnapshot& snapshot) {
    return std::tuple(snapshot.problem.empty(), snapshot.list.sequence, step_of(snapshot.folder));
  };
  std::sort(found.begin(), found.end(),
            [&](const FoundSnapshot& a, const FoundSnapshot& b) { return key(a) < key(b); });
  return found;
}

void replace_snapshot(const std::string& work_folder, const std::string& folder) {
  const auto check = [&](int result) {
    if (result != 0) fail(folder, fmt::format("cannot be written: {}", std::strerror(errno)));
  };
  const std::string output_dir = fs::path(folder).parent_path().string();
  std::optional<std::string> stale;
  if (!path_exists(folder)) {
    check(::rename(work_folder.c_str(), folder.c_str()));
  } else if (::renameat2(AT_FDCWD, work_folder.c_str(), AT_FDCWD, folder.c_str(),
                         RENAME_EXCHANGE) == 0) {
    stale = work_folder;
  } else {
    stale = fmt::format("{}/.{}{}", output_dir, fs::path(folder).filename().string(), kAside);
    check(::rename(folder.c_str(), stale->c_str()));
    check(::rename(work_folder.c_str(), folder.c_str()));
  }
  // Before the old one goes: the disk may take the removal first otherwise.
  sync_folder(output_dir, throw_as<SnapshotError>);
  if (stale) remove_stale(*stale);
}

void remove_snapshot(const std::string& folder) {
  // Renamed first: a kill in between leaves no half of a snapshot.
  const fs::path work = snapshot_work_folder(fs::path(folder).parent_path(), *step_of(folder));
  std::error_code error;
  fs::rename(folder, work, error);
  error ? warn_about(folder, error) : remove_stale(work);
}

void remove_stale_snapshots(const std::string& output_dir) {
  const std::string hidden = fmt::format(".{}", kPrefix);
  for (const fs::path& folder : folders_in(output_dir)) {
    const std::string name = folder.filename().string();
    if (name.rfind(hidden, 0) != 0) continue;
    std::error_code error;
    if (ends_with(name, kAside)) {
      const std::string own_name = name.substr(1, name.size() - 1 - std::strlen(kAside));
      const fs::path place = folder.parent_path() / own_name;
      if (!path_exists(place.string())) {
        fs::rename(folder, place, error);
        continue;
      }
    } else if (!ends_with(name, kWork)) {
      continue;
    }
    remove_stale(folder);
  }
}

}  // namespace headroom
