#pragma once

#ifdef SECUREAFL_EMULATED
#include "gpu.h"  // python_tests/emulator: the same functions for a CPU, to test the kernels without a GPU
#else

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace secureafl::cuda {

// torch's current stream on a device. Only a CUDA build of torch has the function, so it is looked up in the library
// that torch has loaded: one binary serves both builds of torch, whichever of them it was built beside.
inline cudaStream_t current_stream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (!function || function(device, &stream) != 0) {
    throw std::runtime_error("secureafl: this torch has no current CUDA stream");
  }
  return static_cast<cudaStream_t>(stream);
}

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("secureafl: ") + what + ": " + cudaGetErrorString(error));
}

// Programmatic dependent launch (PDL). pdl_trigger: the next kernel, if it was launched with launch_pdl, may start its
// independent prologue. pdl_wait: waits until the previous kernel is complete and its writes are visible.
__device__ inline void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Dynamic shared memory of the block: SECUREAFL_SHARED declares it as an array. shared_memory is for the kernels of
// whole structures; the compiler generates other code for it.
#define SECUREAFL_SHARED(type, name) extern __shared__ type name[]
template <typename T>
__device__ inline T& shared_memory() {
  extern __shared__ float4 bytes[];
  return *reinterpret_cast<T*>(bytes);
}

// Prepares a kernel for a device, once: allows it all of the shared memory of a block. A limit set per launch could
// change during the launch of another thread. Returns true if the code of the kernel has PDL instructions. Code built
// for an older GPU has none, even if a newer GPU compiles it from PTX.
inline bool prepare_kernel(const void* kernel, int32_t device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int32_t>, bool> prepared;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = prepared.find({kernel, device});
  if (found != prepared.end()) return found->second;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "kernel attributes");
  int max_shared_bytes = 0;
  check(cudaDeviceGetAttribute(&max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device limits");
  const int dynamic = max_shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic), "shared memory");
  return prepared[{kernel, device}] = attributes.ptxVersion >= 90;
}

// All launches go through this class: device of the tensors, current stream of torch, error check. Nothing waits for
// the device.
class Launcher {
 public:
  explicit Launcher(int32_t device) : guard_(device), device_(device), stream_(current_stream(device)) {}

  // Bytes of shared memory that one block may use on this device.
  int64_t max_shared_bytes() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

  // Number of blocks that fit on one multiprocessor at a time, limited by shared memory and by `most`.
  int64_t blocks_per_multiprocessor(int64_t shared_bytes, int64_t most) const {
    constexpr int64_t kOwn = 1024;  // reserved by the system in every block
    const int64_t fed = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (shared_bytes + kOwn);
    return fed < 1 ? 1 : fed < most ? fed : most;
  }

  // True if other processes run kernels beside ours (MPS). Then two kernels whose blocks wait for each other could each
  // hold a part of the GPU, for ever.
  bool shares_gpu() const { return attribute(cudaDevAttrMpsEnabled) != 0; }

  int64_t multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }

  template <typename... Params, typename... Args>
  void operator()(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                  const Args&... args) const {
    launch(kNothing, kernel, blocks, threads, shared_bytes, args...);
  }

  // Launches with PDL a kernel that calls pdl_wait. It may start once all blocks of the previous kernel have called
  // pdl_trigger or exited. GPUs without PDL start it after the previous kernel, as usual.
  template <typename... Params, typename... Args>
  void launch_pdl(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                  const Args&... args) const {
    launch(kPdl, kernel, blocks, threads, shared_bytes, args...);
  }

  // Launches a kernel whose blocks wait for each other (meet.cuh). They all run at the same time, or the launch fails:
  // there may be no more of them than fit on the device.
  template <typename... Params, typename... Args>
  void launch_cooperative(void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
                          const Args&... args) const {
    launch(kCooperative, kernel, blocks, threads, shared_bytes, args...);
  }

 private:
  enum Attribute { kNothing, kPdl, kCooperative };

  template <typename... Params, typename... Args>
  void launch(Attribute wanted, void (*kernel)(Params...), int64_t blocks, int threads, int64_t shared_bytes,
              const Args&... args) const {
    if (blocks == 0) return;
    const bool has_pdl = prepare_kernel(reinterpret_cast<const void*>(kernel), device_);
    cudaLaunchAttribute attribute{};
    if (wanted == kPdl) {
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    } else {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream_;
    config.attrs = &attribute;
    config.numAttrs = wanted == kCooperative || (wanted == kPdl && has_pdl) ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, args...), "launch");
  }

  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device_), "device limits");
    return value;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  int32_t device_;
  cudaStream_t stream_;
};

}  // namespace secureafl::cuda

#endif
