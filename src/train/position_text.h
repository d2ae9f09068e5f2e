#pragma once

#include "train/snapshot.h"

#include <string>
#include <string_view>

namespace headroom {

/// A position as lines of text: a name, a blank and a value, in which control characters and % are
/// written as %XX. Equal positions give equal text.
std::string position_text(const TrainingPosition& position);

/// The other way round. Throws SnapshotError, naming `where` and the line, unless every field is
/// there once with a value that a run can have.
TrainingPosition parse_position(std::string_view text, const std::string& where);

}  // namespace headroom
