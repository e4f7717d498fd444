#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "common/launch.cuh"
#include "common/team.cuh"
#include "round/launches.h"
#include "round/renew.h"

namespace secureafl::cuda {

namespace cg = cooperative_groups;

// Kernel of `refresh_`, one warp per client.
static __global__ void refresh_kernel(Round r) {
  SECUREAFL_SHARED(double, shared);
  solve_client(WarpTeam(), r, blockIdx.x, shared);
}

// Kernel 3 of `step_`, one block per client: adds up the sums of the blocks of the pass, in order. Then one warp
// updates the products of the client and solves for its factors.
static __global__ void renew_kernel(Round r, Scratch scratch) {
  SECUREAFL_SHARED(double, shared);
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int n = static_cast<int>(r.n), k = blockIdx.x, planes = static_cast<int>(r.planes());
  const PassSums at{r.n, r.m};
  const int count = static_cast<int>(at.count()), first_own = static_cast<int>(at.own_x(0)), owned = count - first_own;
  pdl_wait();
  const Verdict v = *scratch.verdict;
  const bool fresh = k == v.client && v.stored;
  double* sums = shared;            // (2m + 1): the step times the slots and x of the client
  double* own = sums + planes + 1;  // (owned): the last is v.v
  SECUREAFL_NO_UNROLL
  for (int i = warp.meta_group_rank(); i <= planes + owned; i += warp.meta_group_size()) {
    if (i > planes && i < planes + owned && !fresh) continue;
    const double* parts = scratch.changes + (i <= planes ? i * n + k : first_own + i - planes - 1);
    double sum = 0;
#pragma unroll 4
    for (int b = warp.thread_rank(); b < static_cast<int>(scratch.pass_blocks); b += 32) {
      sum += parts[static_cast<int64_t>(b) * count];
    }
    sum = cg::reduce(warp, sum, cg::plus<double>());
    if (warp.thread_rank() == 0) sums[i] = sum;
  }
  __syncthreads();
  if (warp.meta_group_rank() != 0) return;
  if (warp.thread_rank() == 0) {
    if (int64_t* count = counted_at(r, v, k)) atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ull);
  }
  renew_products(WarpTeam(), r, v, k, sums, own);
  solve_client(WarpTeam(), r, k, own + owned);
}

// 1024 threads if all blocks can run at once: one warp per sum, also for the client with the new row, which has more
// sums. Otherwise 256.
inline int renew_threads(int64_t clients, int64_t multiprocessors) {
  return clients <= 2 * multiprocessors ? 1024 : 256;
}

// Number of doubles of shared memory that `renew_kernel` needs.
inline int64_t renew_scratch(int m) {
  const PassSums at{0, m};
  return rows_of(m) + at.count() + solve_scratch(m);
}

}  // namespace secureafl::cuda
