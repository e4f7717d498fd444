#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <cstdint>

#include "common/host_device.h"

namespace secureafl::cuda {

namespace cg = cooperative_groups;

// A team of a whole block (see team.h); each warp is one row of the grid.
struct BlockTeam {
  static constexpr int kSize = 1024, kDown = 32, kAcross = 32;
  __device__ int size() const { return kSize; }
  __device__ int rank() const { return threadIdx.x; }
  __device__ int down() const { return threadIdx.x / kAcross; }
  __device__ int across() const { return threadIdx.x % kAcross; }
  __device__ void sync() const { __syncthreads(); }
  template <typename T>
  __device__ T sum_across(T value) const {
    return cg::reduce(cg::tiled_partition<32>(cg::this_thread_block()), value, cg::plus<T>());
  }

  template <typename T, int kCount>
  __device__ void sum_all(T (&values)[kCount]) const {
    __shared__ T parts[kCount][kDown];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const T part = sum_across(values[i]);
      if (across() == 0) parts[i][down()] = part;
    }
    sync();
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = sum_across(parts[i][across()]);
    sync();  // the next call may overwrite the parts
  }

  __device__ int sum_before(int value) const {
    __shared__ int sums[kDown];
    int up_to_here = value;  // over the threads of this warp
#pragma unroll
    for (int distance = 1; distance < kAcross; distance *= 2) {
      const int other = __shfl_sync(~0u, up_to_here, across() >= distance ? across() - distance : across());
      up_to_here += across() >= distance ? other : 0;
    }
    if (across() == kAcross - 1) sums[down()] = up_to_here;
    sync();
    const int warps_before = sum_across(across() < down() ? sums[across()] : 0);
    sync();  // the next call may overwrite the sums
    return warps_before + up_to_here - value;
  }

  __device__ void increment(uint32_t* number) const { atomicAdd(number, 1u); }
};

}  // namespace secureafl::cuda
