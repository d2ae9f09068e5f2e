#include <headroom/core/random.h>

#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>

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
  return at::globalContext().defaultGenerator(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

}  // namespace

struct RandomState::Cpu {
  at::mt19937 engine;
  c10::optional<float> next_float;
  c10::optional<double> next_double;
};

RandomState RandomState::capture() {
  RandomState state;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    state.cpu_ = std::make_shared<Cpu>(
        Cpu{impl->engine(), impl->next_float_normal_sample(), impl->next_double_normal_sample()});
  }
  if (at::hasCUDA()) {
    const std::size_t num_devices = at::detail::getCUDAHooks().getNumGPUs();
    for (std::size_t device = 0; device < num_devices; ++device)
      state.cuda_.push_back(read_state(cuda_generator(device)));
  }
  return state;
}

void RandomState::restore() const {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    impl->set_engine(cpu_->engine);
    impl->set_next_float_normal_sample(cpu_->next_float);
    impl->set_next_double_normal_sample(cpu_->next_double);
  }
  for (std::size_t device = 0; device < cuda_.size(); ++device)
    write_state(cuda_generator(device), cuda_[device]);
}

at::Tensor cpu_random_state() { return read_state(at::detail::getDefaultCPUGenerator()); }

void set_cpu_random_state(const at::Tensor& state) {
  write_state(at::detail::getDefaultCPUGenerator(), state);
}

void seed_everything(std::uint64_t seed) { at::manual_seed(seed); }

}  // namespace headroom
