#pragma once

#include "core/hashed_file.h"

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// What a snapshot is made of, and when it was written among those of its folder. This list is the
/// last file to be written, and holds its own SHA-256.
struct SnapshotList {
  std::int64_t sequence = 0;                ///< counts the snapshots written to an output folder
  std::map<std::string, FileDigest> files;  ///< by name
};

std::string snapshot_list_text(const SnapshotList& list);
/// Throws SnapshotError, naming `where`, unless `text` is exactly what snapshot_list_text() gives.
SnapshotList parse_snapshot_list(std::string_view text, const std::string& where);

/// The folder of the snapshot after `step` updates, and that in which it is made.
std::string snapshot_folder(const std::string& output_dir, std::int64_t step);
std::string snapshot_work_folder(const std::string& output_dir, std::int64_t step);

/// Reads and checks the list of a snapshot. Throws SnapshotError.
SnapshotList read_snapshot_list(const std::string& folder);
/// Writes it, which makes the folder a snapshot.
void write_snapshot_list(const std::string& folder, const SnapshotList& list);
/// Throws SnapshotError unless the file is as it was saved. Its size is looked at first: a file of
/// another size, such as one without end, is not read.
void check_snapshot_file(const std::string& folder, const SnapshotList& list,
                         const std::string& name);

/// A folder that is named like a snapshot.
struct FoundSnapshot {
  std::string folder;
  SnapshotList list;
  std::string problem;  ///< why the list cannot be read; empty where it was
};
/// Those of an output folder, in the order in which they were written; the ones with a problem come
/// first.
std::vector<FoundSnapshot> find_snapshots(const std::string& output_dir);

/// Puts the work folder into the place of `folder`, in one step where the system can. At every
/// moment the old snapshot or the new one is there, or is brought back by remove_stale_snapshots(),
/// also on the disk: the old one is removed when that has the new name.
void replace_snapshot(const std::string& work_folder, const std::string& folder);

/// Removes a snapshot, so that no half of it is ever seen. What cannot be removed is a warning.
void remove_snapshot(const std::string& folder);

/// Removes what a run that was killed while it saved has left, and brings back a snapshot that it
/// had put aside. Only for a folder that no other run writes to.
void remove_stale_snapshots(const std::string& output_dir);

}  // namespace headroom
