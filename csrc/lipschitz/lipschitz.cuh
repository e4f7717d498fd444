#pragma once

#include "common/reduce.cuh"
#include "lipschitz/lipschitz.h"

namespace secureafl::cuda {

constexpr int64_t kNormBlocks = 1024;  // maximum; the number depends only on d, so the order of the sums is fixed

// Kernel 1 of `lipschitz`: each block's sums of |g - last_g|^2 and |w - last_w|^2.      partial (2, blocks)
template <typename T>
__global__ void squares_kernel(const T* g, const T* last_g, const T* w, const T* last_w, int64_t d, double* partial) {
  double squares[2] = {};  // of the update, of the model
  for (int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; c < d;
       c += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    squares[0] += squared_difference(g[c], last_g[c]);
    squares[1] += squared_difference(w[c], last_w[c]);
  }
  block_sums(squares);
  if (threadIdx.x < 2) partial[threadIdx.x * gridDim.x + blockIdx.x] = threadIdx.x == 0 ? squares[0] : squares[1];
}

// Kernel 2, one block: adds them up and divides.      partial (2, blocks)   out ()
static __global__ void factor_kernel(const double* partial, int64_t blocks, double* out) {
  double squares[2] = {};
  for (int64_t i = threadIdx.x; i < blocks; i += blockDim.x) {
    squares[0] += partial[i];
    squares[1] += partial[blocks + i];
  }
  block_sums(squares);
  if (threadIdx.x == 0) *out = lipschitz_factor(squares[0], squares[1]);
}

}  // namespace secureafl::cuda
