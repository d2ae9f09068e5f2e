#pragma once

#include <string>

namespace headroom {

/// How OpenMP's threads wait for each other at the end of a loop. Spinning is the fastest on free
/// cores, and many times slower than sleeping where other work wants the same cores: a thread that
/// spins takes the core from the one that it waits for. So a thread of this process looks every 50
/// ms at how long our threads stood in line for a core that another process had, and lets them
/// sleep where that is much (core/contention.h has the rule); from time to time it tries again.
/// Where others keep half of the cores busy or more, threads also gather on those that remain,
/// until the others have gone, and as many as there are cores carry the parts of each loop
/// (core/carried_regions.h). Threads and parts are as many as ever, so that the numbers do not
/// depend on it.
///
/// Starts watching, once per process, `num_threads` that compute; does nothing where the user has
/// decided by OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME, where the OpenMP runtime is not
/// GNU's, or where Linux does not count the time in line.
void adapt_thread_waiting(int num_threads);

/// Cores that this process may run on, whether or not its threads are gathered on fewer just now.
int num_allowed_cores();

/// What decides how threads wait, in words, e.g. "OMP_WAIT_POLICY=passive".
std::string thread_waiting();

}  // namespace headroom
