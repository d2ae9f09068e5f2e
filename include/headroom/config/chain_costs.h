#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace headroom {

/// Limits of a chain given as numbers. They keep every sum of the planner inside 64 bits.
inline constexpr std::int64_t kMaxChainBytes = std::int64_t{1} << 50;  ///< of any one size
inline constexpr std::int64_t kMaxChainNs = std::int64_t{1} << 50;  ///< of any one time (13 days)
inline constexpr int kMaxChainStages = 4096;

/// One way of running a stage forward so that its backward can follow.
struct StageOption {
  std::int64_t kept_bytes = 0;  ///< held from forward to backward, *including* the stage's output
                                ///< but for what it carries, excluding its input and parameters
  std::int64_t forward_ns = 0;
  std::int64_t backward_ns = 0;
  std::int64_t forward_transient_bytes = 0;  ///< above input + kept_bytes, during forward
  std::int64_t backward_transient_bytes =
      0;  ///< above input + kept_bytes + both gradients, during backward
  bool fits =
      true;  ///< false: it was found not to fit, its numbers mean nothing, and no plan has it
};

/// A part of a stage's output that it hands on as it is: memory that an earlier stage's output has
/// brought, and that every boundary in between holds as well (a long skip).
struct CarriedBytes {
  int stages_back = 1;  ///< to the stage that made it: 1 is the one before
  std::int64_t bytes = 0;
};

/// What one stage costs for one micro-batch.
struct StageCosts {
  std::string name;
  std::int64_t output_bytes = 0;
  std::int64_t grad_bytes =
      0;  ///< of the gradient of the output; 0 for the last stage, whose output is the loss
  std::int64_t forward_ns = 0;               ///< of a forward that keeps nothing but its output
  std::int64_t forward_transient_bytes = 0;  ///< above input + output, during such a forward
  std::int64_t param_grad_bytes =
      0;  ///< parameter gradients that appear during backward; 0 where they are already allocated
  std::vector<StageOption>
      options;  ///< at least one; the first is the plain one, which fixed policies use
  std::vector<CarriedBytes> carried;  ///< parts of output_bytes, which no kept_bytes include
  /// Of the gradient of the input, what is the very memory of the gradient of the output.
  std::int64_t carried_grad_bytes = 0;
};

/// A way to hold a boundary (the tensors between two stages) other than as it is. Consumers read
/// what the format gives back.
struct BoundaryFormat {
  std::string name;
  double size_ratio = 1;  ///< stored bytes per byte; 0 for a boundary that leaves the device
  double encode_ns_per_byte = 0;
  double decode_ns_per_byte = 0;
  /// Encoding goes on beside the forward that reads the boundary next, for this part of its time.
  double encode_overlap = 0;
  /// Decoding can go on beside the operation before, for this part of its time. 0: it cannot.
  double decode_overlap = 0;

  /// Bytes that a boundary of `full_bytes` occupies in this format, rounded up.
  std::int64_t stored_bytes(std::int64_t full_bytes) const;
  /// Nanoseconds, rounded to the nearest.
  /// `next_forward_ns` is of the forward that reads the boundary next.
  std::int64_t encode_ns(std::int64_t full_bytes, std::int64_t next_forward_ns) const;
  std::int64_t decode_ns(std::int64_t full_bytes) const;
};

/// A chain of stages as numbers: the planner's input. The input of the first stage is always in
/// memory and is not counted.
struct ChainCosts {
  std::vector<StageCosts> stages;
  std::int64_t input_grad_bytes =
      0;  ///< of the gradient of the chain's input; 0 where none is wanted
  std::vector<BoundaryFormat> boundary_formats;  ///< beside "full", which is always there
};

/// Throws ConfigError, naming the stage and the number, unless the chain has stages, every stage
/// has an option, and all numbers are inside the limits above.
void validate(const ChainCosts& chain);

/// Reads a chain from JSON text; absent numbers are 0. Throws ConfigError on malformed JSON, a
/// wrong type, an unknown key (naming the nearest known one), and on whatever validate() refuses.
/// `source` names the text in messages.
ChainCosts parse_chain_text(std::string_view text, const std::string& source = "chain");

/// The same from a file; throws DataError when it cannot be read.
ChainCosts read_chain_file(const std::string& path);

}  // namespace headroom
