#pragma once

#include <cstdint>

#include "lbfgs/estimate.h"

namespace secureafl::cuda {

constexpr int kEstimateThreads = 256;
constexpr int64_t kEstimateChunk = 4096;

// Kernel 3 of `estimate`: writes out (n, d). A block writes one chunk of the row of one client.
template <typename T>
__global__ void estimates_kernel(History<T> h, Corrections corrections, int64_t chunks, T* out) {
  const int64_t k = blockIdx.x / chunks, start = blockIdx.x % chunks * kEstimateChunk;
  const int64_t stop = start + kEstimateChunk < h.d ? start + kEstimateChunk : h.d;
  for (int64_t c = start + threadIdx.x; c < stop; c += kEstimateThreads) {
    out[k * h.d + c] = estimate_at(h, corrections, k, c);
  }
}

}  // namespace secureafl::cuda
