#include "data/subset.h"

#include "data/sample_order.h"

#include <algorithm>

namespace headroom {
namespace {

class Subset final : public Dataset {
 public:
  Subset(std::shared_ptr<const Dataset> data, std::vector<std::int64_t> samples)
      : data_(std::move(data)), samples_(std::move(samples)) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(samples_.size()); }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    return data_->load(numbers_of(indices));
  }
  std::int64_t count_items(c10::ArrayRef<std::int64_t> indices) const override {
    return data_->count_items(numbers_of(indices));
  }
  std::int64_t length_of(std::int64_t index) const override {
    return data_->length_of(samples_[static_cast<std::size_t>(index)]);
  }
  void expect(c10::ArrayRef<std::int64_t> indices) const override {
    data_->expect(numbers_of(indices));
  }

 private:
  std::vector<std::int64_t> numbers_of(c10::ArrayRef<std::int64_t> indices) const {
    std::vector<std::int64_t> numbers;
    numbers.reserve(indices.size());
    for (const std::int64_t index : indices)
      numbers.push_back(samples_[static_cast<std::size_t>(index)]);
    return numbers;
  }

  std::shared_ptr<const Dataset> data_;
  std::vector<std::int64_t> samples_;
};

}  // namespace

std::unique_ptr<Dataset> make_subset(std::shared_ptr<const Dataset> data,
                                     std::vector<std::int64_t> samples) {
  return std::make_unique<Subset>(std::move(data), std::move(samples));
}

std::pair<std::shared_ptr<const Dataset>, std::shared_ptr<const Dataset>> hold_out_a_tenth(
    std::shared_ptr<const Dataset> data, std::uint64_t seed) {
  const std::int64_t num_held = data->size() / 10;
  if (num_held == 0) return {std::move(data), nullptr};
  const SampleOrder order(data->size(), /*shuffle=*/true, seed, 0);
  std::vector<std::int64_t> held, others;
  for (std::int64_t place = 0; place < order.size(); ++place)
    (place < num_held ? held : others).push_back(order[place]);
  std::sort(held.begin(), held.end());
  std::sort(others.begin(), others.end());
  return {make_subset(data, std::move(others)), make_subset(data, std::move(held))};
}

}  // namespace headroom
