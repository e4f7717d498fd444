#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "common/block_team.cuh"
#include "common/launch.cuh"
#include "common/loads.cuh"
#include "round/judge.h"
#include "row_wise/kinship/choose.h"
#include "row_wise/kinship/kinship.h"

// The three kernels of `kin_step_` (kinship.h). kVector: neighbouring floats that a thread loads at once, 4 if the
// alignment of the state allows it. It must not depend on where update and trained_on begin: that would change the
// order of the sums.

namespace secureafl::cuda {

namespace cg = cooperative_groups;

constexpr int kSumThreads = 256, kStepThreads = 256;
constexpr int kRowsPerWarp = 4;  // rows that a warp multiplies by the update at a time

// Distribution of the sums over warps: each warp processes one group of sums in one chunk of d. The groups, in order:
//   row_groups(compared)   kRowsPerWarp rows each, times the update
//   1                      the sums of the judge
//   row_groups(compared)   with a center: the same rows times the center
//   1                      with a center: the center times the update and times itself
struct KinPlan {
  int64_t groups, chunks, length;  // length: coordinates of a chunk

  SECUREAFL_BOTH static int64_t row_groups(int64_t n) { return (n + kRowsPerWarp - 1) / kRowsPerWarp; }

  static KinPlan of(const KinRound& r) {
    const int64_t d = r.d, least = r.compared > 0 ? 1024 : 256;  // coordinates per warp
    constexpr int64_t kTasks = 4096, kStep = 128;                // about this many warps
    const int64_t groups = (r.centered ? 2 : 1) * (row_groups(r.compared) + 1);
    const int64_t even = (d * groups + kTasks - 1) / kTasks, length = even > least ? even : least;
    const int64_t whole = (length + kStep - 1) / kStep * kStep;
    return {groups, d > whole ? (d + whole - 1) / whole : 1, whole};
  }
};

__device__ inline double warp_sum(double sum) {
  return cg::reduce(cg::tiled_partition<32>(cg::this_thread_block()), sum, cg::plus<double>());
}

// sums (kRowsPerWarp): `by` (d) times the rows from `first` on, over the coordinates of this lane in start .. stop - 1
template <int kVector>
__device__ inline void add_products(const KinRound& r, const float* by, int64_t first, int64_t start, int64_t stop,
                                    double (&sums)[kRowsPerWarp]) {
  const float* rows[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int64_t k = first + i < r.n ? first + i : r.n - 1;  // past n - 1: repeats the last row, unused
    rows[i] = r.last_updates + k * r.d;
  }
#pragma unroll 2
  for (int64_t c = start; c < stop; c += 32 * kVector) {
    float g[kVector], row[kRowsPerWarp][kVector];
    load_unaligned(by + c, g);
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) load_columns(rows[i] + c, row[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const double wide = g[j];
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) sums[i] += wide * row[i][j];
    }
  }
}

// The same for the sums of the judge.
template <int kVector>
__device__ inline void add_judged(const KinRound& r, int64_t start, int64_t stop, double (&sums)[kSums]) {
  const int64_t client = client_of(r);
#pragma unroll 2
  for (int64_t c = start; c < stop; c += 32 * kVector) {
    float g[kVector], w[kVector], last_g[kVector], last_w[kVector];
    load_unaligned(r.update + c, g);
    load_unaligned(r.trained_on + c, w);
    load_columns(r.last_updates + client * r.d + c, last_g);
    load_columns(r.last_models + client * r.d + c, last_w);
#pragma unroll
    for (int j = 0; j < kVector; ++j) add_to_judge(g[j], w[j], last_g[j], last_w[j], sums);
  }
}

// The same if last updates are not kept: nothing to compare with.
template <int kVector>
__device__ inline void add_update(const KinRound& r, int64_t start, int64_t stop, double (&sums)[kSums]) {
#pragma unroll 8
  for (int64_t c = start; c < stop; c += 32 * kVector) {
    float g[kVector];
    load_unaligned(r.update + c, g);
#pragma unroll
    for (int j = 0; j < kVector; ++j) add_to_judge(g[j], 0, g[j], 0, sums);
  }
}

// The center times the update and times itself.
template <int kVector>
__device__ inline void add_center(const KinRound& r, int64_t start, int64_t stop, double (&sums)[2]) {
#pragma unroll 2
  for (int64_t c = start; c < stop; c += 32 * kVector) {
    float g[kVector], center[kVector];
    load_unaligned(r.update + c, g);
    load_unaligned(static_cast<const float*>(r.center) + c, center);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const double wide = center[j];
      sums[0] += wide * g[j];
      sums[1] += wide * center[j];
    }
  }
}

// Stores the sums over the lanes of this warp, the first `count` of them.      parts (count, chunks): one column
template <int kCount>
__device__ inline void store_sums(const double (&sums)[kCount], int64_t count, int64_t chunks, int64_t chunk,
                                  double* parts) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const double sum = warp_sum(sums[i]);
    if (threadIdx.x % 32 == 0 && i < count) parts[i * chunks + chunk] = sum;
  }
}

// Kernel 1: sums over d.      parts (r.sums(), chunks)
template <int kVector>
__global__ void __launch_bounds__(kSumThreads, 2) kin_sums_kernel(KinRound r, KinPlan plan, double* parts) {
  pdl_trigger();
  const int lane = threadIdx.x % 32;
  const int64_t task = (blockIdx.x * static_cast<int64_t>(kSumThreads) + threadIdx.x) / 32;
  const int64_t chunk = task / plan.groups, group = task % plan.groups;
  if (chunk >= plan.chunks) return;
  const int64_t begin = chunk * plan.length, end = begin + plan.length, stop = end < r.d ? end : r.d;
  const int64_t start = begin + lane * kVector;
  const int64_t row_groups = KinPlan::row_groups(r.compared), of_center = r.compared + kSums;
  if (group == row_groups) {
    double sums[kSums] = {};
    r.last_updates ? add_judged<kVector>(r, start, stop, sums) : add_update<kVector>(r, start, stop, sums);
    return store_sums(sums, kSums, plan.chunks, chunk, parts + r.compared * plan.chunks);
  }
  if (group == 2 * row_groups + 1) {
    double sums[2] = {};
    add_center<kVector>(r, start, stop, sums);
    return store_sums(sums, 2, plan.chunks, chunk, parts + (of_center + r.n) * plan.chunks);
  }
  const bool by_update = group < row_groups;
  const int64_t first = (by_update ? group : group - row_groups - 1) * kRowsPerWarp;
  double sums[kRowsPerWarp] = {};
  add_products<kVector>(r, by_update ? r.update : r.center, first, start, stop, sums);
  store_sums(sums, r.n - first, plan.chunks, chunk, parts + (first + (by_update ? 0 : of_center)) * plan.chunks);
}

// Kernel 2, one block: choose.      parts (r.sums(), chunks)   rows, weights (n)
template <typename R>
__global__ void __launch_bounds__(BlockTeam::kSize)
    kin_choose_kernel(R r, int64_t chunks, const double* parts, Choice* out, int32_t* rows, float* weights) {
  __shared__ Choice choice;
  double* sums = &shared_memory<double>();  // (r.sums())
  const BlockTeam team;
  const Table table(sums + r.sums(), r.n);
  pdl_trigger();
  pdl_wait();
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < static_cast<int>(r.sums()); i += BlockTeam::kDown) {
    double sum = 0;
#pragma unroll 4
    for (int b = team.across(); b < static_cast<int>(chunks); b += BlockTeam::kAcross) sum += parts[i * chunks + b];
    sum = team.sum_across(sum);
    if (team.across() == 0) sums[i] = sum;
  }
  if (team.rank() == 0) choice.rows = rows;
  if (team.rank() == 0) choice.weights = weights;
  if (team.rank() == 0 && r.barrier) *r.barrier = 0;
  team.sync();
  choose(team, r, sums, table, &choice);
  team.sync();
  if (team.rank() == 0) *out = choice;
}

inline int64_t choose_bytes(const KinRound& r) {
  return (r.sums() + Table::doubles(r.n)) * static_cast<int64_t>(sizeof(double));
}

// Kernel 3: a block processes 32 kVector coordinates, and each of its warps every eighth row.
template <int kVector>
__global__ void __launch_bounds__(kStepThreads) kin_step_kernel(KinRound r, const Choice* chosen) {
  constexpr int kWarps = kStepThreads / 32, kColumns = 32 * kVector;
  __shared__ float parts[kWarps][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns, start = first + lane * kVector;
  const int64_t own = first + threadIdx.x;  // the coordinate that this thread updates
  const bool steps = threadIdx.x < kColumns && own < r.d;
  float g = 0, w = 0, model = 0, center = 0;
  if (steps) {
    if (r.centered) center = r.center[own];
    g = r.update[own];
    w = r.trained_on[own];
    model = r.model[own];
  }
  pdl_wait();
  const Choice choice = *chosen;
  const Verdict& v = choice.verdict;
  float sums[kVector] = {};
  if (start < r.d) {
#pragma unroll 4
    for (int i = warp; i < choice.count; i += kWarps) {
      float row[kVector];
      load_columns(r.last_updates + choice.rows[i] * r.d + start, row);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sums[j] += choice.weights[i] * row[j];
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) parts[warp][lane * kVector + j] = sums[j];
  __syncthreads();
  if (!steps) return;
  float direction = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) direction += parts[i][threadIdx.x];
  g = clipped(v, g);
  if (v.received) direction += choice.own_weight * g;
  if (r.centered) {
    direction += choice.center_weight * center;
    if (v.steps && choice.any && isfinite(direction)) r.center[own] = direction;
  }
  r.next_model[own] = stepped(v, model, direction);
  if (!v.stored) return;
  r.last_updates[v.client * r.d + own] = g;
  r.last_models[v.client * r.d + own] = w;
}

}  // namespace secureafl::cuda
