#include <headroom/core/random.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>
#include <utility>

namespace headroom {
namespace {

at::Tensor read_state(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void write_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

at::Generator cuda_generator(std::size_t device) {
  return at::globalContext().defaultGenerator(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

}  // namespace

RandomState RandomState::capture() {
  RandomState state;
  state.cpu_ = read_state(at::detail::getDefaultCPUGenerator());
  if (at::hasCUDA()) {
    const std::size_t num_devices = at::detail::getCUDAHooks().getNumGPUs();
    for (std::size_t device = 0; device < num_devices; ++device) state.cuda_.push_back(read_state(cuda_generator(device)));
  }
  return state;
}

void RandomState::restore() const {
  write_state(at::detail::getDefaultCPUGenerator(), cpu_);
  for (std::size_t device = 0; device < cuda_.size(); ++device) write_state(cuda_generator(device), cuda_[device]);
}

RandomState RandomState::from_cpu(at::Tensor cpu_state) {
  RandomState state = capture();
  state.cpu_ = std::move(cpu_state);
  return state;
}

void seed_everything(std::uint64_t seed) { at::manual_seed(seed); }

}  // namespace headroom
