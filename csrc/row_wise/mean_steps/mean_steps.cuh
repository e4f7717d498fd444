#pragma once

#include "common/block_team.cuh"
#include "common/launch.cuh"
#include "common/loads.cuh"
#include "row_wise/mean_steps/choose.h"
#include "row_wise/mean_steps/mean_steps.h"
#include "row_wise/support/refresh.cuh"

// The kernels of `mean_step_` after the first two of kin_step.cuh: the step, and three of a refresh, which return at
// once in all other rounds. Every kernel waits for the one before, so each sees the results of all before it.

namespace secureafl::cuda {

constexpr int kEdge = 64, kProductThreads = 256;  // an edge of a tile of products
// Coordinates of a tile at a time: 128 neighbouring bytes of each mean.
template <typename S>
constexpr int kDepth = 128 / sizeof(S);
constexpr int kMostDepth = 64;

// Kernel 3: the next model, the client's new mean, and its new row if these are kept. S: of the means. kVector: as in
// kin_step.cuh; the state is aligned for loads of so many.
template <typename S, int kVector>
__global__ void __launch_bounds__(kStepThreads) mean_step_kernel(MeanRound r, const Choice* chosen) {
  const int64_t start = (blockIdx.x * static_cast<int64_t>(kStepThreads) + threadIdx.x) * kVector;
  const bool inside = start < r.d;
  float g[kVector] = {}, w[kVector] = {}, model[kVector] = {}, mean[kVector] = {};
  if (inside) {
    load_unaligned(r.update + start, g);
    load_columns(r.model + start, model);
    load_columns(static_cast<const S*>(r.own_means) + client_of(r) * r.d + start, mean);
    if (r.last_models) load_unaligned(r.trained_on + start, w);
  }
  pdl_trigger();
  pdl_wait();
  if (!inside) return;
  const Choice choice = *chosen;
  const Verdict& v = choice.verdict;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    g[j] = clipped(v, g[j]);
    model[j] = stepped(v, model[j], v.received ? choice.own_weight * g[j] : 0.0f);
    mean[j] = averaged(choice, mean[j], g[j]);
  }
  store_columns(r.next_model + start, model);
  if (!v.stored) return;
  const int64_t row = v.client * r.d + start;
  if (choice.mean_share > 0) store_columns(static_cast<S*>(r.own_means) + row, mean);
  if (!r.last_updates) return;
  store_columns(r.last_updates + row, g);
  store_columns(r.last_models + row, w);
}

// Distribution of the products over blocks: each processes one tile of (n, n) on or below the diagonal, in one chunk of
// d. It depends on the shapes alone.
struct MeansPlan {
  int64_t edges, tiles, chunks, length;

  static MeansPlan of(int64_t n, int64_t d) {
    constexpr int64_t kBlocks = 264;  // about this many
    const int64_t edges = (n + kEdge - 1) / kEdge, tiles = edges * (edges + 1) / 2;
    const int64_t wanted = kBlocks > tiles ? kBlocks / tiles : 1, each = (d + wanted - 1) / wanted;
    const int64_t length = d > 0 ? (each + kMostDepth - 1) / kMostDepth * kMostDepth : kMostDepth;
    return {edges, tiles, (d + length - 1) / length, length};
  }
  int64_t parts() const { return tiles * chunks * kEdge * kEdge; }
  SECUREAFL_BOTH int64_t tile(int64_t down, int64_t across) const { return down * (down + 1) / 2 + across; }
};

// A tile of kEdge rows of the means and kDepth<S> coordinates on its way to shared memory: of each thread kPieces
// pieces of four neighbouring coordinates, in rows that are kRows apart. S: of the means.
template <typename S>
struct MeansPiece {
  static constexpr int kAcross = kDepth<S> / 4, kRows = kProductThreads / kAcross, kPieces = kEdge / kRows;
  S values[kPieces][4];  // as they are stored; converted on the way to shared memory

  // The rows from `first` on, coordinates start .. start + kDepth<S> - 1; zero past n and `stop`. wide: the means are
  // aligned for loads of four
  __device__ void load(const MeanRound& r, int64_t first, int64_t start, int64_t stop, bool wide) {
    const int64_t c = start + threadIdx.x % kAcross * 4;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int64_t k = first + threadIdx.x / kAcross + i * kRows;
      const S* from = static_cast<const S*>(r.own_means) + k * r.d + c;
      if (wide && k < r.n && c < stop) {
        copy_columns(from, values[i]);
        continue;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (k < r.n && c + j < stop) {
          values[i][j] = from[j];
        } else {
          from_float(0.0f, values[i][j]);
        }
      }
    }
  }
  __device__ void store(float (&tile)[kEdge][kDepth<S> + 4]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      float floats[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) floats[j] = to_float(values[i][j]);
      store_columns(&tile[threadIdx.x / kAcross + i * kRows][threadIdx.x % kAcross * 4], floats);
    }
  }
};

// Kernel 4, many blocks: products of the means.     parts (tiles, chunks, kEdge, kEdge)
// Sums over kDepth<S> coordinates are in float32, the sums of these in float64. The next tiles are loaded meanwhile.
template <typename S>
__global__ void __launch_bounds__(kProductThreads, 2) mean_products_kernel(MeanRound r, MeansPlan plan, double* parts) {
  constexpr int kSide = 16, kOwn = kEdge / kSide;  // threads along an edge; products of a thread along it
  alignas(16) __shared__ float rows[kEdge][kDepth<S> + 4],
      columns[kEdge][kDepth<S> + 4];  // 4: other banks for each row
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
  const bool wide = r.d % 4 == 0 && reinterpret_cast<uintptr_t>(r.own_means) % 16 == 0;
  MeansPiece<S> of_rows, of_columns;
  of_rows.load(r, down * kEdge, begin, stop, wide);
  of_columns.load(r, across * kEdge, begin, stop, wide);
  for (int64_t start = begin; start < stop; start += kDepth<S>) {
    of_rows.store(rows);
    of_columns.store(columns);
    __syncthreads();
    of_rows.load(r, down * kEdge, start + kDepth<S>, stop, wide);
    of_columns.load(r, across * kEdge, start + kDepth<S>, stop, wide);
    float few[kOwn][kOwn] = {};
#pragma unroll
    for (int c = 0; c < kDepth<S>; c += 4) {
      float a[kOwn][4], b[kOwn][4];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        load_columns(&rows[y + i * kSide][c], a[i]);
        load_columns(&columns[x + i * kSide][c], b[i]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) few[i][j] = add_dot(few[i][j], a[i], b[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) sums[i][j] += few[i][j];
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

// The three kernels. Many: the team of plan.blocks    S: of the means
template <typename Many, typename S>
void launch_refresh(const Launcher& launch, const MeanRound& r, const MeansPlan& means, const RefreshPlan& plan,
                    const Refresh& args, const MeansScratch& scratch) {
  launch.launch_pdl(mean_products_kernel<S>, means.tiles * means.chunks, kProductThreads, 0, r, means, scratch.parts);
  launch.launch_pdl(mean_sums_kernel, (r.n * r.n + kProductThreads - 1) / kProductThreads, kProductThreads, 0, r, means,
                    static_cast<const double*>(scratch.parts), scratch.products);
  launch_refresh_kernel(launch, plan, mean_refresh_kernel<BlockTeam>, mean_refresh_kernel<Many>, r, args,
                        scratch.products, scratch.lengths, scratch.refresh, plan.room);
}

}  // namespace secureafl::cuda
