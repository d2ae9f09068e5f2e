#pragma once

// --memory_budget auto: what the machine or the container can give.

#include <headroom/config/training_arguments.h>

#include <cstdint>

namespace headroom {

/// Settles the budget of arguments that leave it to the machine, and says so in one line; others
/// stay as they are. The budget is what may still be taken, by MemAvailable, the limits of control
/// groups and RLIMIT_AS, whichever is least, shared by `num_local_ranks`, and the tensors that are
/// there already, less a reserve for what the program takes beside tensors. Threads and buffers of
/// libraries are made first, so that they are counted. Throws BudgetError when nothing is left.
void settle_budget(TrainingArguments& arguments, std::int64_t num_local_ranks = 1);

}  // namespace headroom
