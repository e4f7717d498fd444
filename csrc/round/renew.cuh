#pragma once

#include "common/reduce.cuh"
#include "common/team.cuh"
#include "round/renew.h"

namespace secureafl::cuda {

// Sums that the renewal of one client needs: the step times its slots and x; its own, if its row is new; v.v.
SECUREAFL_BOTH int renew_sums(int m) { return rows_of(m) + static_cast<int>(PassSums{0, m}.count()); }

// Number of doubles of shared memory for the renewal of one client.
SECUREAFL_BOTH int renew_scratch(int m) { return renew_sums(m) + solve_scratch(m); }

// Run by a whole block: renews the clients first, first + stride, .. by the sums of the round with verdict v, at_once
// of them at a time. All warps add up the sums of the blocks of the pass, in order. Then one warp per client updates
// its products and solves for its factors.      changes (PassSums::count, blocks)   shared (at_once, renew_scratch)
__device__ inline void renew_clients(const Round& r, const Verdict& v, const double* changes, int blocks, int first,
                                     int stride, int at_once, double* shared) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int warps = warp.meta_group_size(), n = static_cast<int>(r.n), m = static_cast<int>(r.m), rows = rows_of(m);
  const int sums = renew_sums(m), scratch = renew_scratch(m), first_own = static_cast<int>(PassSums{n, m}.own_x(0));
  SECUREAFL_NO_UNROLL
  for (; first < n; first += at_once * stride) {
    SECUREAFL_NO_UNROLL
    for (int task = warp.meta_group_rank(); task < at_once * sums; task += warps) {
      const int place = task / sums, i = task % sums, k = first + place * stride;
      const bool own = i >= rows && i < sums - 1;  // not read unless the row is new
      if (k >= n || (own && !(k == v.client && v.stored))) continue;
      const int from = i < rows ? i * n + k : first_own + i - rows;
      const double sum = warp_sum(changes + static_cast<int64_t>(from) * blocks, blocks);
      if (warp.thread_rank() == 0) shared[place * scratch + i] = sum;
    }
    __syncthreads();
    // The last warps first: thread 0 has other work.
    SECUREAFL_NO_UNROLL
    for (int place = warps - 1 - warp.meta_group_rank(); place < at_once; place += warps) {
      const int k = first + place * stride;
      if (k >= n) continue;
      double* of_client = shared + place * scratch;
      renew_products(WarpTeam(), r, v, k, of_client, of_client + rows);
      solve_client(WarpTeam(), r, k, of_client + sums);
    }
    __syncthreads();
  }
}

}  // namespace secureafl::cuda
