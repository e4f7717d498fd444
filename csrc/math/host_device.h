#pragma once

// This folder is arithmetic alone: no torch, no allocation, no exceptions. A translation unit is either host
// or device code and sees these functions as its own kind, so a CI machine without a GPU runs the GPU's math.
#if defined(__CUDACC__)
#define SECUREAFL_FN __device__ __forceinline__
#define SECUREAFL_BOTH __host__ __device__ constexpr  // what the host needs beside a launch
#else
#define SECUREAFL_FN inline
#define SECUREAFL_BOTH constexpr
#endif
