#include "train/class_counts.h"

#include <algorithm>
#include <cstring>

namespace headroom {

ClassCounts::Count& ClassCounts::at(std::int64_t number) {
  const auto index = static_cast<std::size_t>(std::max<std::int64_t>(0, number));
  if (index >= counts_.size()) counts_.resize(index + 1);
  return counts_[index];
}

void ClassCounts::add(const at::Tensor& chosen, const at::Tensor& right) {
  const at::Tensor a = chosen.cpu().contiguous(), b = right.cpu().contiguous();
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const std::int64_t x = a.data_ptr<std::int64_t>()[i], y = b.data_ptr<std::int64_t>()[i];
    if (y < 0) continue;  // a target that counts for nothing
    ++at(x).num_chosen;
    ++at(y).num_right;
    if (x == y) ++at(x).num_agreed;
  }
}

std::string ClassCounts::bytes() const {
  return {reinterpret_cast<const char*>(counts_.data()), counts_.size() * sizeof(Count)};
}

void ClassCounts::add_bytes(const std::string& bytes) {
  for (std::size_t i = 0; i < bytes.size() / sizeof(Count); ++i) {
    Count other;
    std::memcpy(&other, bytes.data() + i * sizeof(Count), sizeof(Count));
    Count& mine = at(static_cast<std::int64_t>(i));
    mine.num_chosen += other.num_chosen;
    mine.num_right += other.num_right;
    mine.num_agreed += other.num_agreed;
  }
}

std::optional<double> ClassCounts::f1() const {
  const auto score = [](const Count& count) {
    return 2.0 * static_cast<double>(count.num_agreed) /
           static_cast<double>(std::max<std::int64_t>(1, count.num_chosen + count.num_right));
  };
  if (counts_.empty()) return std::nullopt;
  if (counts_.size() <= 2) return score(counts_.back());
  double sum = 0.0;
  std::int64_t num_classes = 0;
  for (const Count& count : counts_) {
    if (count.num_chosen + count.num_right == 0) continue;
    sum += score(count);
    ++num_classes;
  }
  return sum / static_cast<double>(std::max<std::int64_t>(1, num_classes));
}

}  // namespace headroom
