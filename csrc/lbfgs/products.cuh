#pragma once

#include <cstdint>

#include "common/team.cuh"
#include "lbfgs/lbfgs.h"

namespace secureafl::cuda {

constexpr int kProductThreads = 256;
constexpr int kProductTile = 128;  // coordinates per tile in shared memory
// Products per thread: 16 pairs have 562 products, for 256 threads.
constexpr int kProductsEach = 3;

// Chunks of d. They depend only on d, so the order of every sum is fixed.
struct Chunks {
  int64_t size, count;

  static Chunks of(int64_t d) {
    constexpr int64_t kLeast = 2048, kMost = 256;
    const int64_t size = d > kLeast * kMost ? (d + kMost - 1) / kMost : kLeast;
    return {size, d > size ? (d + size - 1) / size : 1};
  }
};

// Kernel 1 of `estimate` and `aggregate`: inner products of one client over one chunk.
//   partial (n, chunks, products_of(m))
// A block loads a tile of the rows of its client as doubles. Each thread computes some of the products over all
// coordinates of the tile. If there are few products, several threads (slices) share one, each with its own
// coordinates.
template <typename T>
__global__ void products_kernel(History<T> h, Wanted wanted, Chunks chunks, double* partial) {
  extern __shared__ double shared[];
  constexpr int kStride = kProductTile + 1;  // odd: the rows of one column are in different banks
  const int64_t k = blockIdx.x / chunks.count, chunk = blockIdx.x % chunks.count;
  const int64_t pairs = wanted(k) ? h.pairs_of(k) : 0;
  if (pairs == 0) return;

  const int rows = static_cast<int>(rows_of(pairs)), count = static_cast<int>(products_of(pairs));
  const int slices = count < kProductThreads ? kProductThreads / count : 1;
  const int slice = threadIdx.x / count, first = threadIdx.x % count;
  int left[kProductsEach], right[kProductsEach];
  double sums[kProductsEach] = {};
#pragma unroll
  for (int i = 0; i < kProductsEach; ++i) {
    const int product = first + i * kProductThreads;
    int row = 0;
    while (packed(row + 1, 0) <= product) ++row;
    left[i] = row;
    right[i] = row == rows ? row : product - static_cast<int>(packed(row, 0));  // the last product is g.g
  }

  const int64_t stop = (chunk + 1) * chunks.size < h.d ? (chunk + 1) * chunks.size : h.d;
  for (int64_t start = chunk * chunks.size; start < stop; start += kProductTile) {
    const int width = static_cast<int>(stop - start < kProductTile ? stop - start : kProductTile);
    for (int i = threadIdx.x; i < (rows + 1) * kProductTile; i += kProductThreads) {
      const int row = i / kProductTile, c = i % kProductTile;
      if (c < width) shared[row * kStride + c] = row_value(h, k, pairs, row, start + c);
    }
    __syncthreads();
    if (slice < slices) {
#pragma unroll
      for (int i = 0; i < kProductsEach; ++i) {
        if (first + i * kProductThreads >= count) break;
        for (int c = slice; c < width; c += slices) {
          sums[i] += shared[left[i] * kStride + c] * shared[right[i] * kStride + c];
        }
      }
    }
    __syncthreads();
  }

  // shared (slices, count)
  if (slice < slices) {
#pragma unroll
    for (int i = 0; i < kProductsEach; ++i) {
      const int product = first + i * kProductThreads;
      if (product < count) shared[slice * count + product] = sums[i];
    }
  }
  __syncthreads();
  for (int product = threadIdx.x; product < count; product += kProductThreads) {
    double sum = 0;
    for (int s = 0; s < slices; ++s) sum += shared[s * count + product];
    partial[blockIdx.x * products_of(h.m) + product] = sum;
  }
}

// Kernel 2: from partial products to corrections, one warp per client.      factors (n, 2m + 1)   status (n)
template <typename T>
__global__ void coefficients_kernel(History<T> h, Wanted wanted, int64_t chunks, const double* partial, double trust,
                                    double* factors, Status* status) {
  extern __shared__ double shared[];
  const int64_t k = blockIdx.x, pairs = wanted(k) ? h.pairs_of(k) : 0;
  double* gram = shared;                        // (products_of(pairs))
  double* scratch = shared + products_of(h.m);  // (scratch_of(pairs))
  for (int64_t product = threadIdx.x; pairs > 0 && product < products_of(pairs); product += 32) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      sum += partial[(k * chunks + chunk) * products_of(h.m) + product];
    }
    gram[product] = sum;
  }
  __syncwarp();
  const Status outcome =
      coefficients(WarpTeam(), gram, pairs, trust, kWideRounding, scratch, factors + k * rows_of(h.m));
  if (threadIdx.x == 0) status[k] = wanted(k) ? outcome : Status::kAbsent;
}

}  // namespace secureafl::cuda
