#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "coordinate_wise/rank.h"

// Kernel of `aggregate` with any rule, and of `median` and `trimmed_mean` where in_registers.cuh does not fit: float64,
// more than 1024 rows.

namespace secureafl::cuda {

namespace cg = cooperative_groups;

// The keys of one column in shared memory, read by the 32 lanes of a warp.
template <typename T>
struct WarpColumn {
  const Key<T>* keys;  // (n), `stride` apart
  int stride, n;
  cg::thread_block_tile<32> warp;

  __device__ bool all(bool own) const { return own; }
  __device__ int32_t kept() const { return count_below(kAbsent<T>); }

  __device__ int32_t count_below(Key<T> bound) const {
    unsigned count = 0;
    for (int k = warp.thread_rank(); k < n; k += 32) count += keys[k * stride] < bound;
    return cg::reduce(warp, count, cg::plus<unsigned>());
  }

  __device__ Key<T> least_from(Key<T> bound) const {
    Key<T> least = kAbsent<T>;
    for (int k = warp.thread_rank(); k < n; k += 32) {
      const Key<T> key = keys[k * stride];
      if (key >= bound && key < least) least = key;
    }
    return cg::reduce(warp, least, cg::less<Key<T>>());
  }

  __device__ Key<T> greatest_below(Key<T> bound) const {
    Key<T> greatest = 0;
    for (int k = warp.thread_rank(); k < n; k += 32) {
      const Key<T> key = keys[k * stride];
      if (key < bound && key > greatest) greatest = key;
    }
    return cg::reduce(warp, greatest, cg::greater<Key<T>>());
  }

  __device__ double sum_between(Key<T> low, Key<T> high) const {
    double sum = 0;
    for (int k = warp.thread_rank(); k < n; k += 32) {
      const Key<T> key = keys[k * stride];
      if (key > low && key < high) sum += from_key<T>(key);
    }
    return cg::reduce(warp, sum, cg::plus<double>());
  }
};

// The rule over each column of rows (n, d).      out (d)
// A block processes 2^tile_bits columns at a time. All threads fill a tile of keys, row by row so that loads coalesce.
// Then each warp reduces its own columns. The stride is odd: a warp that reads down a column touches different banks.
template <typename Rows, typename out_t>
__global__ void reduce_columns_kernel(Rows rows, Rule rule, int64_t trim, int tile_bits, out_t* out) {
  using T = typename Rows::value_type;
  extern __shared__ double shared[];                 // double: aligned for either key
  Key<T>* keys = reinterpret_cast<Key<T>*>(shared);  // (n, stride)
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int n = static_cast<int>(rows.n), tile = 1 << tile_bits, stride = tile | 1;
  for (int64_t start = blockIdx.x * static_cast<int64_t>(tile); start < rows.d;
       start += gridDim.x * static_cast<int64_t>(tile)) {
    for (int i = threadIdx.x; i < n << tile_bits; i += blockDim.x) {
      const int k = i >> tile_bits, c = i & (tile - 1);
      if (start + c < rows.d) keys[k * stride + c] = rows.key(k, start + c);
    }
    __syncthreads();
    for (int c = warp.meta_group_rank(); c < tile && start + c < rows.d; c += warp.meta_group_size()) {
      const WarpColumn<T> column{keys + c, stride, n, warp};
      const T value = reduce_column<T>(column, rule, trim);
      if (warp.thread_rank() == 0) out[start + c] = static_cast<out_t>(value);
    }
    __syncthreads();
  }
}

}  // namespace secureafl::cuda
