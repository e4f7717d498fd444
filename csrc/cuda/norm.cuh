#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "../math/norm.h"

namespace secureafl::cuda {

namespace cg = cooperative_groups;

constexpr int kNormThreads = 256;
constexpr int64_t kNormBlocks = 1024;  // at most; a fixed number for a given d fixes the order of the sums

// Sum over the block, complete in thread 0.
__device__ inline double block_sum(double value) {
  __shared__ double sums[kNormThreads / 32];
  const auto block = cg::this_thread_block();
  const auto warp = cg::tiled_partition<32>(block);
  value = cg::reduce(warp, value, cg::plus<double>());
  block.sync();  // the last call's readers are done
  if (warp.thread_rank() == 0) sums[warp.meta_group_rank()] = value;
  block.sync();
  double sum = 0;
  if (block.thread_rank() == 0) {
    for (const double part : sums) sum += part;
  }
  return sum;
}

// partial (2, blocks): this block's share of |g - last_g|^2 and |w - last_w|^2
template <typename T>
__global__ void squares_kernel(const T* g, const T* last_g, const T* w, const T* last_w, int64_t d, double* partial) {
  double update_square = 0, model_square = 0;
  for (int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; c < d;
       c += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    update_square += squared_difference(g[c], last_g[c]);
    model_square += squared_difference(w[c], last_w[c]);
  }
  update_square = block_sum(update_square);
  model_square = block_sum(model_square);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = update_square;
    partial[gridDim.x + blockIdx.x] = model_square;
  }
}

// One block.      partial (2, blocks)   out ()
static __global__ void factor_kernel(const double* partial, int64_t blocks, double* out) {
  double update_square = 0, model_square = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += blockDim.x) {
    update_square += partial[i];
    model_square += partial[blocks + i];
  }
  update_square = block_sum(update_square);
  model_square = block_sum(model_square);
  if (threadIdx.x == 0) *out = lipschitz_factor(update_square, model_square);
}

}  // namespace secureafl::cuda
