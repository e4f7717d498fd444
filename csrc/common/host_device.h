#pragma once

// The folder math/ is arithmetic alone: no torch, no allocation, no exceptions. A translation unit is either host
// or device code and sees these functions as its own kind, so a CI machine without a GPU runs the GPU's math.
//
// The two kinds get names of their own: nvcc also compiles each .cu for the host, with stubs in place of device
// functions, and under one name the linker might keep the stub and drop the CPU's function.
#if defined(__CUDACC__)
#define SECUREAFL_KIND device_code
#define SECUREAFL_FN __device__ __forceinline__
#define SECUREAFL_BOTH __host__ __device__ constexpr  // what the host needs beside a launch
// A loop that is to stay one: code that a kernel runs through once takes longer to fetch than to execute.
#define SECUREAFL_NO_UNROLL _Pragma("unroll 1")
// One of few turns, so that its loads are on their way together.
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
