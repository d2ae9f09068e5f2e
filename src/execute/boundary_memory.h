#pragma once

// Which memory the tensors of boundaries, and their gradients, are in. A stage may hand on memory
// that another one allocated, which then counts once.

#include <headroom/config/chain_costs.h>

#include "execute/stage_run.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace headroom {

std::set<const void*> storages_of(const Tensors& tensors);

/// Which stage made the memory of each tensor of a boundary, counting from 1.
using Makers = std::map<const void*, int>;

/// The memory of a stage's outputs, which stays for as long as the boundary holds it, however
/// little of it the outputs read.
struct OutputMemory {
  Makers makers;                      ///< of all that is not resident
  std::vector<CarriedBytes> carried;  ///< what stages before it made
};

/// Of stage `number`, whose inputs are in the memory of `input_makers`. `resident` memory is always
/// there.
OutputMemory find_output_memory(int number, const Tensors& outputs, const Makers& input_makers,
                                const std::set<const void*>& resident);

/// Where the gradient of a stage's input is: in the memory of that of an output, of which it may be
/// a view, or in memory that backward allocated.
struct InputGradient {
  int output = -1;
  int allocation = -1;     ///< the same for inputs that share one
  std::int64_t bytes = 0;  ///< of the allocation
};

/// `output_storages` are those of the gradients that backward was given.
std::vector<InputGradient> locate_input_gradients(const Tensors& input_gradients,
                                                  const std::vector<const void*>& output_storages);

/// Of all allocations together.
std::int64_t allocated_bytes(const std::vector<InputGradient>& places);

/// The gradients of the boundaries of one stage.
struct GradientMemory {
  std::int64_t input_bytes = 0;    ///< of the gradient of its input, in whatever memory
  std::int64_t carried_bytes = 0;  ///< of these, in memory of the gradient of its output
};

/// Of every stage, given the places of the gradients of its inputs. The gradient of a boundary
/// occupies whatever memory its tensors are in: that of a far later boundary, where they only pass
/// through stages or are views.
std::vector<GradientMemory> find_gradient_memory(
    const std::vector<std::vector<InputGradient>>& places);

}  // namespace headroom
