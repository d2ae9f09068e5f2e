#include "execute/boundary_memory.h"

#include "core/tensor_storage.h"

#include <algorithm>
#include <utility>

namespace headroom {

std::set<const void*> storages_of(const Tensors& tensors) {
  std::set<const void*> storages;
  for (const at::Tensor& tensor : tensors) storages.insert(storage_of(tensor));
  storages.erase(nullptr);
  return storages;
}

OutputMemory find_output_memory(int number, const Tensors& outputs, const Makers& input_makers,
                                const std::set<const void*>& resident) {
  OutputMemory memory;
  std::map<int, std::int64_t> bytes_by_distance;
  for (const at::Tensor& output : outputs) {
    const void* storage = storage_of(output);
    if (storage == nullptr || resident.count(storage) != 0) continue;
    const auto found = input_makers.find(storage);
    const int maker = found == input_makers.end() ? number : found->second;
    if (!memory.makers.emplace(storage, maker).second || maker == number) continue;
    bytes_by_distance[number - maker] += static_cast<std::int64_t>(output.storage().nbytes());
  }
  for (const auto& [distance, bytes] : bytes_by_distance)
    memory.carried.push_back({distance, bytes});
  return memory;
}

std::vector<InputGradient> locate_input_gradients(const Tensors& input_gradients,
                                                  const std::vector<const void*>& output_storages) {
  std::vector<InputGradient> places;
  std::vector<const void*> allocations;
  const auto index_in = [](const std::vector<const void*>& all, const void* storage) {
    const auto found = std::find(all.begin(), all.end(), storage);
    return found == all.end() ? -1 : static_cast<int>(found - all.begin());
  };
  for (const at::Tensor& gradient : input_gradients) {
    InputGradient place;
    if (const void* storage = storage_of(gradient)) {
      place.output = index_in(output_storages, storage);
      if (place.output < 0) {
        if (index_in(allocations, storage) < 0) allocations.push_back(storage);
        place.allocation = index_in(allocations, storage);
        place.bytes = static_cast<std::int64_t>(gradient.storage().nbytes());
      }
    }
    places.push_back(place);
  }
  return places;
}

std::int64_t allocated_bytes(const std::vector<InputGradient>& places) {
  std::map<int, std::int64_t> by_allocation;
  for (const InputGradient& place : places) {
    if (place.allocation >= 0) by_allocation[place.allocation] = place.bytes;
  }
  std::int64_t bytes = 0;
  for (const auto& [allocation, size] : by_allocation) bytes += size;
  return bytes;
}

std::vector<GradientMemory> find_gradient_memory(
    const std::vector<std::vector<InputGradient>>& places) {
  std::vector<GradientMemory> gradients(places.size());
  using Memory = std::pair<std::size_t, int>;  // the stage that allocated it, and which one
  std::vector<Memory> outputs;
  const Memory none(0, -1);
  std::map<Memory, std::int64_t> sizes;
  const auto total = [&](const std::set<Memory>& memories) {
    std::int64_t bytes = 0;
    for (const Memory& memory : memories) bytes += sizes.at(memory);
    return bytes;
  };
  for (std::size_t l = places.size(); l-- > 0;) {
    std::vector<Memory> inputs;
    std::set<Memory> held, handed_on;
    for (const InputGradient& place : places[l]) {
      const auto output = static_cast<std::size_t>(place.output);
      Memory memory = none;
      if (place.output >= 0 && output < outputs.size()) memory = outputs[output];
      if (place.allocation >= 0) {
        memory = {l, place.allocation};
        sizes[memory] = place.bytes;
      }
      inputs.push_back(memory);
      if (memory == none) continue;
      held.insert(memory);
      if (memory.first != l) handed_on.insert(memory);
    }
    gradients[l] = {total(held), total(handed_on)};
    outputs = std::move(inputs);
  }
  return gradients;
}

}  // namespace headroom
