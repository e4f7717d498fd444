#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <cstdint>

namespace secureafl::cuda {

namespace cg = cooperative_groups;

constexpr int kNormThreads = 256;

// Block-wide sums of kCount values per thread; every thread gets the results. One warp adds up each sum: the code is
// short, which matters in a kernel that runs it once.
template <int kCount>
__device__ inline void block_sums(double (&values)[kCount]) {
  static_assert(kCount <= kNormThreads / 32, "one warp for each sum");
  __shared__ double parts[kCount][kNormThreads], sums[kCount];
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
#pragma unroll
  for (int i = 0; i < kCount; ++i) parts[i][threadIdx.x] = values[i];
  __syncthreads();
  if (warp.meta_group_rank() < kCount) {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kNormThreads; i += 32) sum += parts[warp.meta_group_rank()][i + warp.thread_rank()];
    sum = cg::reduce(warp, sum, cg::plus<double>());
    if (warp.thread_rank() == 0) sums[warp.meta_group_rank()] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = sums[i];
}

// Sum of `count` values by one warp, in a fixed order; every lane gets it. The values may be another block's.
__device__ inline double warp_sum(const double* values, int count) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  double sum = 0;
#pragma unroll 4
  for (int i = warp.thread_rank(); i < count; i += 32) sum += __ldcg(values + i);
  return cg::reduce(warp, sum, cg::plus<double>());
}

}  // namespace secureafl::cuda
