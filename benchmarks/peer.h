#pragma once

// The PyTorch that benchmarks compare with, and the line that says what was compared.

#include <headroom/core/runtime.h>

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace headroom::benchmark {

/// The command that runs Python with PyTorch: HEADROOM_PEER_PYTHON, which may have arguments
/// ("chroot /debian python3": the sources must be there under the same path), or else Debian's.
inline std::string peer_python() {
  const char* chosen = std::getenv("HEADROOM_PEER_PYTHON");
  return chosen != nullptr && *chosen != '\0' ? chosen : "/usr/bin/python3";
}

/// Of that PyTorch; ends the program where it has none.
inline std::string peer_version() {
  const std::string command = peer_python() + " -c 'import torch; print(torch.__version__)'";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  char version[64] = "";
  const bool read = pipe != nullptr && std::fscanf(pipe, "%63s", version) == 1;
  if (pipe != nullptr) ::pclose(pipe);
  if (read) return version;
  fmt::print(stderr,
             "no PyTorch to compare with: this gave no version: {} (Debian: python3-torch; "
             "HEADROOM_PEER_PYTHON names another Python)\n",
             command);
  std::exit(1);
}

inline std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

/// CPU, threads, precision and libraries: what a figure says nothing without.
inline void print_setting() {
  const RuntimeInfo info = runtime_info();
  fmt::print("{} ({}), {} threads, fp32; ours: {} with LibTorch {} and {}\n", cpu_name(),
             info.cpu_features, info.num_threads, info.headroom_version, info.libtorch_version,
             info.blas);
}

}  // namespace headroom::benchmark
