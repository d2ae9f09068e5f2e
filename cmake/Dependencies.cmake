find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(Torch REQUIRED)
# Ours is C++17; newer LibTorch refuses a compiler that is told less than C++20, in this header.
find_file(ATEN_HEADER ATen/ATen.h PATHS ${TORCH_INCLUDE_DIRS} REQUIRED)
file(STRINGS ${ATEN_HEADER} ATEN_WANTS_CXX20 REGEX "__cplusplus < 20[2-9]")
if(ATEN_WANTS_CXX20)
  set(CMAKE_CXX_STANDARD 20)
endif()
find_package(nlohmann_json REQUIRED)
find_package(spdlog REQUIRED)
find_package(fmt REQUIRED)
find_package(CLI11 REQUIRED)
find_package(ZLIB REQUIRED)
find_package(JPEG REQUIRED)
find_package(PNG REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
# oneDNN, for products of bf16 matrices; without it they are computed in fp32.
find_library(DNNL_LIBRARY dnnl)
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.hpp)
find_package(hwy QUIET)
if(NOT TARGET hwy::hwy)
  find_library(HWY_LIBRARY hwy REQUIRED)
  add_library(hwy::hwy UNKNOWN IMPORTED)
  set_target_properties(hwy::hwy PROPERTIES IMPORTED_LOCATION ${HWY_LIBRARY})
endif()
find_library(UTF8PROC_LIBRARY utf8proc REQUIRED)
find_path(UTF8PROC_INCLUDE_DIR utf8proc.h REQUIRED)
include(SentencePiece)

# Whether this LibTorch can connect ranks, and the headers for that are there.
get_target_property(TORCH_DEFINITIONS torch_cpu INTERFACE_COMPILE_DEFINITIONS)
find_path(GLOO_INCLUDE_DIR gloo/transport/device.h)
set(HEADROOM_HAS_GLOO OFF)
if("${TORCH_DEFINITIONS}" MATCHES "USE_C10D_GLOO" AND GLOO_INCLUDE_DIR)
  set(HEADROOM_HAS_GLOO ON)
else()
  message(WARNING "LibTorch's Gloo was not found (Debian: libgloo-dev): training on several ranks is left out")
endif()

# The OpenMP flavour of OpenBLAS shares LibTorch's thread pool; any other flavour makes two pools fight and a step 2-3x slower. The three
# files are linked before torch with an rpath to their own folder, so that they are loaded first whatever the system's alternatives say.
find_path(HEADROOM_OPENBLAS_DIR libopenblas.so.0
          HINTS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE}/openblas-openmp /usr/lib/openblas-openmp
          NO_DEFAULT_PATH)
add_library(headroom_blas INTERFACE)
if(HEADROOM_OPENBLAS_DIR)
  target_link_libraries(headroom_blas INTERFACE
      ${HEADROOM_OPENBLAS_DIR}/libopenblas.so.0 ${HEADROOM_OPENBLAS_DIR}/libblas.so.3 ${HEADROOM_OPENBLAS_DIR}/liblapack.so.3)
  target_link_options(headroom_blas INTERFACE
      LINKER:--disable-new-dtags,-rpath,${HEADROOM_OPENBLAS_DIR} LINKER:--no-as-needed)
else()
  message(WARNING "OpenBLAS with OpenMP was not found (Debian: libopenblas0-openmp): training will be 2-3x slower")
endif()

# Kernels of LibTorch are called as it was compiled: with one for each of three CPUs, or with one.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES torch_cpu c10)
check_cxx_source_compiles("
#include <cstdint>
namespace c10 { enum class DeviceType : std::int8_t {}; }
namespace at::native { struct DispatchStubImpl { void* get_call_ptr(c10::DeviceType, void*, void*, void*); }; }
int main() { return at::native::DispatchStubImpl().get_call_ptr({}, nullptr, nullptr, nullptr) != nullptr; }
" HEADROOM_TORCH_HAS_AVX_KERNELS)
unset(CMAKE_REQUIRED_LIBRARIES)
