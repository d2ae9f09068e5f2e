#pragma once

#include "report/run_record.h"

#include <string>

namespace headroom {

/// A run as one HTML page that needs nothing else: no script, no file from elsewhere, charts as
/// inline SVG, colours for light and dark.
std::string to_html(const RunRecord& run);

}  // namespace headroom
