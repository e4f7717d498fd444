#pragma once

// Macros for arithmetic that host and device share: plain headers without torch, allocation or exceptions. A
// translation unit is either host code or device code, and the functions are of its kind. So a CI machine without a GPU
// tests the arithmetic of the GPU.
//
// Each kind has a namespace of its own. nvcc also compiles each .cu file for the host, with stubs in place of device
// functions. With one namespace the linker could keep the stub and drop the function of the CPU.
#if defined(__CUDACC__)
#define SECUREAFL_KIND device_code
#define SECUREAFL_FN __device__ __forceinline__
#define SECUREAFL_BOTH __host__ __device__ constexpr  // also called by the host, beside a launch
// Do not unroll: code that a kernel runs only once takes longer to fetch than to execute.
#define SECUREAFL_NO_UNROLL _Pragma("unroll 1")
// Unroll a short loop, so that its loads are issued together.
#define SECUREAFL_UNROLL _Pragma("unroll")
#else
#define SECUREAFL_KIND host_code
#define SECUREAFL_FN inline
#define SECUREAFL_BOTH constexpr
#define SECUREAFL_NO_UNROLL
#define SECUREAFL_UNROLL
#endif

namespace secureafl {
inline namespace SECUREAFL_KIND {}
}  // namespace secureafl
