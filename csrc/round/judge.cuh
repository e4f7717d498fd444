#pragma once

#include "common/reduce.cuh"
#include "round/judge.h"
#include "round/launches.h"
#include "round/quantile.h"
#include "round/tiles.h"

namespace secureafl::cuda {

constexpr int kJudgeThreads = 256;
constexpr int64_t kJudgeBlocks = 264;

// Block-wide sum of a tally per thread; every thread gets the result.
__device__ inline Tally block_tally(const Tally& tally) {
  constexpr int kWarps = kJudgeThreads / 32;
  __shared__ Tally parts[kWarps];
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const auto sum_of = [&](int64_t value) { return cg::reduce(warp, value, cg::plus<int64_t>()); };
  const Tally part{sum_of(tally.below), sum_of(tally.all), sum_of(tally.others)};
  if (warp.thread_rank() == 0) parts[warp.meta_group_rank()] = part;
  __syncthreads();
  Tally sum{};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    sum.below += parts[i].below;
    sum.all += parts[i].all;
    sum.others += parts[i].others;
  }
  return sum;
}

struct JudgeTeam {
  static constexpr int kSize = kJudgeThreads;
  __device__ int rank() const { return threadIdx.x; }
};

// Run by the last block: adds up the sums of all blocks, in order, and decides.
__device__ inline void decide_together(const Round& r, const Scratch& scratch, const ClientState& before) {
  constexpr int kBatch = 8;
  __shared__ FactorList lists[kMaxClients];
  FactorWalk<JudgeTeam, kBatch> walk(JudgeTeam(), r, before);
  walk.fetch();  // the loads overlap with the sums below
  Tally tally{0, weigh_lists(JudgeTeam(), r, before, lists),
              census_of_others(JudgeTeam(), r.presence, r.seen, r.n, before.client)};
  double sums[kSums] = {};
  SECUREAFL_NO_UNROLL
  for (int b = threadIdx.x; b < gridDim.x; b += kJudgeThreads) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __ldcg(&scratch.judged[i * gridDim.x + b]);
  }
  block_sums(sums);  // has a barrier: all threads see the lists
  const double factor = factor_of(before, sums);
  tally.below = walk.below(lists, factor);
  SECUREAFL_NO_UNROLL
  while (walk.more()) {
    walk.fetch();
    tally.below += walk.below(lists, factor);
  }
  tally = block_tally(tally);
  if (threadIdx.x == 0) *scratch.verdict = decide(r, before, sums, tally);
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
