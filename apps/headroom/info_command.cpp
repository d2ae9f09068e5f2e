#include "commands.h"

#include <headroom/core/runtime.h>
#include <headroom/execute/autocast.h>
#include "report/json.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <CLI/CLI.hpp>

namespace headroom {

Command add_info_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("info", "versions, devices, threads, BLAS flavour, what is missing");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "for machines");
  auto config = std::make_shared<ConfigFlag>(*command);
  return [json, config] {
    config->apply();
    configure_threads(0);
    const RuntimeInfo info = runtime_info();
    const HalfPrecision bf16 = choose_half_precision(torch::kCPU, torch::kBFloat16);
    const HalfPrecision fp16 = choose_half_precision(torch::kCPU, torch::kHalf);
    if (*json) {
      Json object = Json::object();
      Json warnings = Json::array();
      for (const std::string& warning : info.warnings) warnings.push(warning);
      object.set("headroom", info.headroom_version)
          .set("libtorch", info.libtorch_version)
          .set("blas", info.blas)
          .set("blas_is_openmp", info.blas_is_openmp)
          .set("num_threads", info.num_threads)
          .set("num_threads_reason", info.num_threads_reason)
          .set("thread_waiting", info.thread_waiting)
          .set("num_cores", info.num_cores)
          .set("cpu_features", info.cpu_features)
          .set("cuda", info.has_cuda)
          .set("cpu_computes_in_bf16", bf16.autocast)
          .set("bf16", bf16.reason)
          .set("fp16", fp16.reason)
          .set("warnings", warnings);
      if (info.cpu_quota) object.set("cpu_quota", *info.cpu_quota);
      fmt::print("{}\n", object.dump());
    } else {
      fmt::print(
          "headroom   {}\nLibTorch   {}\nBLAS       {}\nthreads    {} ({})\nwaiting    {}\nCPU     "
          "   "
          "{}\nCUDA       {}\n",
          info.headroom_version, info.libtorch_version, info.blas, info.num_threads,
          info.num_threads_reason, info.thread_waiting, info.cpu_features,
          info.has_cuda ? "yes" : "no");
      fmt::print("precision  {}\n           {}\n", bf16.reason, fp16.reason);
      for (const std::string& warning : info.warnings) fmt::print("warning: {}\n", warning);
    }
    return 0;
  };
}

}  // namespace headroom
