#pragma once

#include <cstdint>

namespace headroom {

/// Runs this program again as `num_ranks` ranks on this machine, with the same words, and waits for
/// them. Ctrl-C, SIGTERM and SIGHUP are passed on; a second one ends the ranks at once. When a rank
/// fails, the others, who notice that by themselves, are given a while and then ended. Returns 0 or
/// 130 as the ranks did, the exit code of a rank that failed by itself, or 6 when one was killed or
/// lost. Throws CommError when they cannot be started.
int launch_ranks(std::int64_t num_ranks);

}  // namespace headroom
