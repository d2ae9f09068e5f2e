#pragma once

// A model of PyTorch's in a process of its own (pytorch_gpt.py serve), which runs one update
// whenever it is told to.

#include "core/blas_kernels.h"
#include "peer.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <string>

class PyTorchProcess {
 public:
  /// `arguments` are those of `serve` of the script beside the benchmark. PyTorch gets the matrix
  /// kernels that this program uses, unless it shall run as it is installed. With `autocast` it
  /// computes in bf16.
  PyTorchProcess(const std::string& arguments, bool as_installed,
                 const std::string& script = "pytorch_gpt.py", bool autocast = false) {
    int to_child[2], from_child[2];
    // Closed in other children: PyTorch ends when the last writer of its input does.
    if (pipe2(to_child, O_CLOEXEC) != 0 || pipe2(from_child, O_CLOEXEC) != 0)
      throw std::runtime_error("no pipe");
    const std::string core = headroom::blas_core();
    const std::string blas = as_installed || core.empty() ? "" : "OPENBLAS_CORETYPE=" + core + " ";
    const std::string command =
        fmt::format("{}{}exec {} {}/{} serve {}", blas, autocast ? "HEADROOM_AUTOCAST=1 " : "",
                    headroom::benchmark::peer_python(), HEADROOM_BENCHMARK_DIR, script, arguments);
    child_ = fork();
    if (child_ == 0) {
      dup2(to_child[0], 0);
      dup2(from_child[1], 1);
      for (const int end : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(end);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    in_ = fdopen(to_child[1], "w");
    out_ = fdopen(from_child[0], "r");
    read();  // resident bytes at the start
  }
  PyTorchProcess(const PyTorchProcess&) = delete;
  PyTorchProcess& operator=(const PyTorchProcess&) = delete;

  /// Seconds of one update.
  double update() {
    std::fputs("update\n", in_);
    std::fflush(in_);
    return read();
  }

  /// Ends the process; the most resident bytes above the start.
  double finish() {
    std::fclose(in_);
    const double bytes = read();
    std::fclose(out_);
    waitpid(child_, nullptr, 0);
    return bytes;
  }

 private:
  double read() {
    double value = 0.0;
    if (std::fscanf(out_, "%lf", &value) != 1)
      throw std::runtime_error("PyTorch did not answer; is python3-torch installed?");
    return value;
  }

  pid_t child_ = 0;
  std::FILE* in_ = nullptr;
  std::FILE* out_ = nullptr;
};
