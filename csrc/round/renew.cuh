#pragma once

#include "common/reduce.cuh"
#include "common/team.cuh"
#include "round/renew.h"

namespace secureafl::cuda {

// Sums that the renewal of one client needs: the step times its slots and x; its own, if its row is new; v.v.
SECUREAFL_BOTH int renew_sums(int m) { return rows_of(m) + static_cast<int>(PassSums{0, m}.count()); }

// A copy of the products of one client, in shared memory.
struct ProductsCopy {
  double* at;  // gram (m (2m + 1)), along (2m + 2), scales (2m floats), pairs, oldest, seen (ints)
  int m;

  SECUREAFL_BOTH static int doubles(int m) { return packed(2 * m, 0) + 2 * m + 2 + m + 2; }
  __device__ double* along() const { return at + packed(2 * m, 0); }
  __device__ float* scales() const { return reinterpret_cast<float*>(along() + 2 * m + 2); }
  __device__ int32_t* numbers() const { return reinterpret_cast<int32_t*>(scales() + 2 * m); }
  __device__ ClientProducts products() const {
    return {at, along(), scales(), numbers()[0], numbers()[1], numbers()[2] != 0};
  }

  // Run by a warp. The scales are stored last, so that all loads take one wait. 2m is at most 32.
  __device__ void load(const ClientProducts& from) const {
    const int lane = WarpTeam().rank(), squares = packed(2 * m, 0), count = squares + 2 * m + 2;
    const float scale = lane < 2 * m ? from.scales[lane] : 0.0f;
    SECUREAFL_NO_UNROLL
    for (int i = lane; i < count; i += WarpTeam::kSize) at[i] = i < squares ? from.gram[i] : from.along[i - squares];
    if (lane < 2 * m) scales()[lane] = scale;
    if (lane < 3) numbers()[lane] = lane == 0 ? from.pairs : lane == 1 ? from.oldest : from.seen;
  }

  // Run by a warp.
  __device__ void store(const ClientProducts& to, bool with_gram) const {
    const int lane = WarpTeam().rank();
    SECUREAFL_NO_UNROLL
    for (int i = lane; i < 2 * m + 2; i += WarpTeam::kSize) to.along[i] = along()[i];
    if (!with_gram) return;
    SECUREAFL_NO_UNROLL
    for (int i = lane; i < packed(2 * m, 0); i += WarpTeam::kSize) to.gram[i] = at[i];
  }
};

// Number of doubles of shared memory for the renewal of one client.
SECUREAFL_BOTH int renew_scratch(int m) { return renew_sums(m) + ProductsCopy::doubles(m) + solve_scratch(m); }

// Run by a whole block: renews the clients first, first + stride, .. by the sums of the round with verdict v, at_once
// of them at a time. All warps add up the sums of the blocks of the pass, in order, and copy the products of the
// clients. Then one warp per client updates its products and solves for its factors, in shared memory.
//   changes (PassSums::count, blocks)   shared (at_once, renew_scratch)
__device__ inline void renew_clients(const Round& r, const Verdict& v, const double* changes, int blocks, int first,
                                     int stride, int at_once, double* shared) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int warps = warp.meta_group_size(), n = static_cast<int>(r.n), m = static_cast<int>(r.m), rows = rows_of(m);
  const int sums = renew_sums(m), scratch = renew_scratch(m), first_own = static_cast<int>(PassSums{n, m}.own_x(0));
  const int tasks = sums + 1;
  const auto is_fresh = [&](int k) { return k == v.client && v.stored; };
  SECUREAFL_NO_UNROLL
  for (; first < n; first += at_once * stride) {
    SECUREAFL_NO_UNROLL
    for (int task = warp.meta_group_rank(); task < at_once * tasks; task += warps) {
      const int place = task / tasks, i = task % tasks, k = first + place * stride;
      const bool own = i >= rows && i < sums - 1;  // not read unless the row is new
      if (k >= n || (own && !is_fresh(k))) continue;
      double* of_client = shared + place * scratch;
      if (i == sums) {
        ProductsCopy{of_client + sums, m}.load(client_products(r, k));
        continue;
      }
      const int from = i < rows ? i * n + k : first_own + i - rows;
      const double sum = warp_sum(changes + static_cast<int64_t>(from) * blocks, blocks);
      if (warp.thread_rank() == 0) of_client[i] = sum;
    }
    __syncthreads();
    // The last warps first: thread 0 has other work.
    SECUREAFL_NO_UNROLL
    for (int place = warps - 1 - warp.meta_group_rank(); place < at_once; place += warps) {
      const int k = first + place * stride;
      if (k >= n) continue;
      double* of_client = shared + place * scratch;
      const ProductsCopy copy{of_client + sums, m};
      const ClientProducts products = copy.products();
      renew_products(WarpTeam(), r, v, k, products, of_client, of_client + rows);
      copy.store(client_products(r, k), is_fresh(k) && v.pushed);
      solve_client(WarpTeam(), r, k, products, of_client + sums + ProductsCopy::doubles(m));
    }
    __syncthreads();
  }
}

}  // namespace secureafl::cuda
