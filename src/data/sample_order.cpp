#include "data/sample_order.h"

#include "core/counter_random.h"

#include <numeric>
#include <random>
#include <utility>

namespace headroom {
namespace {

// Four rounds of a Luby-Rackoff cipher cannot be told from a random permutation; two more are for
// the round function, which mixes well but is no cipher.
constexpr int kRounds = 6;

// std::shuffle is free to differ between standard libraries; this is not.
std::vector<std::int64_t> shuffled(std::int64_t num_samples, std::mt19937_64& generator) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(num_samples));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator() % i]);
  return order;
}

}  // namespace

SampleOrder::SampleOrder(std::int64_t num_samples, bool shuffle, std::uint64_t seed,
                         std::int64_t epoch)
    : size_(num_samples) {
  if (!shuffle) return;
  std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                         static_cast<std::uint32_t>(epoch)};
  std::mt19937_64 generator(sequence);
  if (num_samples <= kMostInTable) {
    table_ = shuffled(num_samples, generator);
    return;
  }
  key_ = generator();
  while ((std::uint64_t{1} << (2 * half_bits_)) < static_cast<std::uint64_t>(num_samples))
    ++half_bits_;
}

// A Feistel network permutes the numbers of an even number of bits.
std::uint64_t SampleOrder::permuted(std::uint64_t place) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = place >> half_bits_, right = place & mask;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t bits =
        draw(key_, static_cast<std::int64_t>(right), static_cast<std::int64_t>(round));
    left = std::exchange(right, left ^ (bits & mask));
  }
  return left << half_bits_ | right;
}

std::int64_t SampleOrder::operator[](std::int64_t place) const {
  if (!table_.empty()) return table_[static_cast<std::size_t>(place)];
  if (half_bits_ == 0) return place;
  // What falls beyond the samples is permuted again: each walk along a cycle of the permutation
  // ends at the next of its numbers that is a sample, and no two walks at the same.
  auto sample = static_cast<std::uint64_t>(place);
  do {
    sample = permuted(sample);
  } while (sample >= static_cast<std::uint64_t>(size_));
  return static_cast<std::int64_t>(sample);
}

}  // namespace headroom
