#pragma once

#include "common/block_team.cuh"
#include "common/launch.cuh"
#include "row_wise/mean_steps/choose.h"
#include "row_wise/mean_steps/mean_steps.h"
#include "row_wise/support/refresh.cuh"

// The kernels of `mean_step_` after those of kin_step.cuh: a refresh. In all other rounds they return at once. Every
// kernel waits for the one before, so each sees the results of all before it.

namespace secureafl::cuda {

constexpr int kEdge = 64, kDepth = 32, kProductThreads = 256;  // a tile of products, and coordinates at a time

// Distribution of the products over blocks: each processes one tile of (n, n) on or below the diagonal, in one chunk of
// d. It depends on the shapes alone.
struct MeansPlan {
  int64_t edges, tiles, chunks, length;

  static MeansPlan of(int64_t n, int64_t d) {
    constexpr int64_t kBlocks = 264;  // about this many
    const int64_t edges = (n + kEdge - 1) / kEdge, tiles = edges * (edges + 1) / 2;
    const int64_t wanted = kBlocks > tiles ? kBlocks / tiles : 1, each = (d + wanted - 1) / wanted;
    const int64_t length = d > 0 ? (each + kDepth - 1) / kDepth * kDepth : kDepth;
    return {edges, tiles, (d + length - 1) / length, length};
  }
  int64_t parts() const { return tiles * chunks * kEdge * kEdge; }
  SECUREAFL_BOTH int64_t tile(int64_t down, int64_t across) const { return down * (down + 1) / 2 + across; }
};

// Puts kEdge rows of the means from `first` on, coordinates start .. start + kDepth - 1, into out (kDepth, kEdge + 1);
// zero past n and `stop`.
__device__ inline void load_means(const MeanRound& r, int64_t first, int64_t start, int64_t stop,
                                  double (&out)[kDepth][kEdge + 1]) {
  const int64_t c = start + threadIdx.x % kDepth;
#pragma unroll
  for (int row = threadIdx.x / kDepth; row < kEdge; row += kProductThreads / kDepth) {
    const int64_t k = first + row;
    out[threadIdx.x % kDepth][row] = k < r.n && c < stop ? r.own_means[k * r.d + c] : 0.0f;
  }
}

// Kernel 4, many blocks: products of the means.     parts (tiles, chunks, kEdge, kEdge)
static __global__ void __launch_bounds__(kProductThreads)
    mean_products_kernel(MeanRound r, MeansPlan plan, double* parts) {
  constexpr int kSide = 16, kOwn = kEdge / kSide;  // threads along an edge; products of a thread along it
  __shared__ double rows[kDepth][kEdge + 1], columns[kDepth][kEdge + 1];
  pdl_trigger();
  pdl_wait();
  if (*r.rounds % r.every != 0) return;
  const int64_t tile = blockIdx.x / plan.chunks, chunk = blockIdx.x % plan.chunks;
  int64_t down = 0;
  while (plan.tile(down + 1, 0) <= tile) ++down;
  const int64_t across = tile - plan.tile(down, 0);
  const int64_t begin = chunk * plan.length, end = begin + plan.length, stop = end < r.d ? end : r.d;
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
  double sums[kOwn][kOwn] = {};
  for (int64_t start = begin; start < stop; start += kDepth) {
    load_means(r, down * kEdge, start, stop, rows);
    load_means(r, across * kEdge, start, stop, columns);
    __syncthreads();
#pragma unroll 4
    for (int c = 0; c < kDepth; ++c) {
      double a[kOwn], b[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) a[i] = rows[c][y + i * kSide], b[i] = columns[c][x + i * kSide];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) sums[i][j] += a[i] * b[j];
      }
    }
    __syncthreads();  // the next coordinates overwrite these
  }
  double* out = parts + blockIdx.x * static_cast<int64_t>(kEdge * kEdge);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) out[(y + i * kSide) * kEdge + x + j * kSide] = sums[i][j];
  }
}

// Kernel 5, a thread for each product: the sums over the chunks.     products (n, n)
static __global__ void __launch_bounds__(kProductThreads)
    mean_sums_kernel(MeanRound r, MeansPlan plan, const double* parts, double* products) {
  pdl_trigger();
  pdl_wait();
  if (*r.rounds % r.every != 0) return;
  const int64_t at = blockIdx.x * static_cast<int64_t>(kProductThreads) + threadIdx.x;
  if (at >= r.n * r.n) return;
  const int64_t i = at / r.n, k = at % r.n, down = i > k ? i : k, across = i > k ? k : i;
  const double* from = parts + plan.tile(down / kEdge, across / kEdge) * plan.chunks * kEdge * kEdge +
                       down % kEdge * kEdge + across % kEdge;
  double sum = 0;
#pragma unroll 4
  for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) sum += from[chunk * kEdge * kEdge];
  products[at] = sum;
}

// Kernel 6: the refresh.     products (n, n)   lengths (n): scratch
template <typename Team>
static __global__ void __launch_bounds__(BlockTeam::kSize)
    mean_refresh_kernel(MeanRound r, Refresh args, double* products, double* lengths, RefreshScratch scratch,
                        int64_t room) {
  pdl_wait();
  if (*r.rounds % r.every != 0) return;
  const Team team = team_of<Team>(scratch);
  const int n = static_cast<int>(r.n);
  for (int k = team.rank(); k < n; k += Team::kSize) lengths[k] = shortened(r, k, products[k * n + k]);
  team.sync();
  for_entries(team, n, [&](int at, int i, int k) { products[at] *= lengths[i] * lengths[k]; });
  args.means = products;
  refresh_clients(team, r, args, scratch, room);
}

// Scratch memory of a refresh.
struct MeansScratch {
  double *parts, *products, *lengths;
  RefreshScratch refresh;

  static int64_t doubles(int64_t n, const MeansPlan& means, const RefreshPlan& plan) {
    return means.parts() + n * n + n + plan.doubles();
  }

  MeansScratch(double* at, int64_t n, const MeansPlan& means, const RefreshPlan& plan)
      : parts(at), products(parts + means.parts()), lengths(products + n * n), refresh(lengths + n, plan) {}
};

// The three kernels. Many: the team of plan.blocks
template <typename Many>
void launch_refresh(const Launcher& launch, const MeanRound& r, const MeansPlan& means, const RefreshPlan& plan,
                    const Refresh& args, const MeansScratch& scratch) {
  launch.launch_pdl(mean_products_kernel, means.tiles * means.chunks, kProductThreads, 0, r, means, scratch.parts);
  launch.launch_pdl(mean_sums_kernel, (r.n * r.n + kProductThreads - 1) / kProductThreads, kProductThreads, 0, r, means,
                    static_cast<const double*>(scratch.parts), scratch.products);
  launch_refresh_kernel(launch, plan, mean_refresh_kernel<BlockTeam>, mean_refresh_kernel<Many>, r, args,
                        scratch.products, scratch.lengths, scratch.refresh, plan.room);
}

}  // namespace secureafl::cuda
