#pragma once

#include "common/reduce.cuh"
#include "round/judge.h"
#include "round/launches.h"
#include "round/quantile.h"
#include "round/tiles.h"

namespace secureafl::cuda {

constexpr int kJudgeThreads = 256;
constexpr int64_t kJudgeBlocks = 264;

// Block-wide sums of some integers per thread; every thread gets them.
template <int kCount>
__device__ inline void block_totals(int64_t (&values)[kCount]) {
  constexpr int kWarps = kJudgeThreads / 32;
  __shared__ int64_t parts[kWarps][kCount];
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t part = cg::reduce(warp, values[i], cg::plus<int64_t>());
    if (warp.thread_rank() == 0) parts[warp.meta_group_rank()][i] = part;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) values[i] += parts[w][i];
  }
}

struct JudgeTeam {
  static constexpr int kSize = kJudgeThreads;
  __device__ int rank() const { return threadIdx.x; }
};

// The verdict, from the contributions of all threads to the tally and to the census of the other clients.
__device__ inline void decide_as_block(const Round& r, const ClientState& before, const double* sums,
                                       const Tally& tally, const Census& others, Verdict* verdict) {
  int64_t both[] = {tally.below, tally.all};
  Census all = others;
  block_totals(both);
  block_totals(all.of);
  if (threadIdx.x != 0) return;
  *verdict = decide(r, before, sums, {both[0], both[1]}, all);
}

// Run by the last block: adds up the sums of all blocks, in order, and decides.
__device__ inline void decide_together(const Round& r, const Scratch& scratch, const ClientState& before) {
  constexpr int kBatch = 8;
  __shared__ FactorList lists[kMaxClients];
  FactorWalk<JudgeTeam, kBatch> walk(JudgeTeam(), r, before);
  walk.fetch();  // the loads overlap with the sums below
  Tally tally{0, weigh_lists(JudgeTeam(), r, before, lists)};
  const Census others = census_of_others(JudgeTeam(), r.presence, r.seen, r.n, before.client);
  double sums[kSums] = {};
  SECUREAFL_NO_UNROLL
  for (int b = threadIdx.x; b < gridDim.x; b += kJudgeThreads) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __ldcg(&scratch.judged[i * gridDim.x + b]);
  }
  block_sums(sums);  // has a barrier: all threads see the lists
  const double factor = factor_of(before, sums);
  add_counts(JudgeTeam(), r, before, factor, tally);
  tally.below += walk.below(lists, factor);
  SECUREAFL_NO_UNROLL
  while (walk.more()) {
    walk.fetch();
    tally.below += walk.below(lists, factor);
  }
  decide_as_block(r, before, sums, tally, others, scratch.verdict);
}

// sums (kSums) += sums over the coordinates of this thread.
__device__ __forceinline__ void add_coordinates(const Round& r, int32_t client, double (&sums)[kSums]) {
  const int bits = __ffs(static_cast<int>(r.columns)) - 1;  // columns: a power of two
#pragma unroll 2
  for (int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; c < r.d;
       c += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    const float* row = r.last + (((c >> bits) * 2 * r.n + client) << bits) + (c & (r.columns - 1));
    const float g = r.update[c];
    const float s = r.trained_on[c] - row[0], y = g - row[r.n << bits];
    sums[kNonFinite] += !isfinite(g);
    sums[kGG] += static_cast<double>(g) * g;
    sums[kYY] += static_cast<double>(y) * y;
    sums[kSS] += static_cast<double>(s) * s;
    sums[kSY] += static_cast<double>(s) * y;
  }
}

// Kernel 1 of `step_`: sums over all coordinates of the update, then the verdict. static: one copy per translation
// unit.
static __global__ void judge_kernel(Round r, Scratch scratch) {
  __shared__ bool last;
  pdl_trigger();
  const ClientState before = client_state(r);
  double sums[kSums] = {};
  add_coordinates(r, before.client, sums);
  block_sums(sums);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) scratch.judged[i * gridDim.x + blockIdx.x] = sums[i];
    __threadfence();
    last = atomicInc(r.arrived, gridDim.x - 1) == gridDim.x - 1;  // wraps to zero for the next round
  }
  __syncthreads();
  if (last) decide_together(r, scratch, before);
}

}  // namespace secureafl::cuda
