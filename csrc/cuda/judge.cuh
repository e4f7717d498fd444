#pragma once

#include "../math/round.h"
#include "norm.cuh"
#include "round.h"

namespace secureafl::cuda {

constexpr int kJudgeThreads = 256;
constexpr int64_t kJudgeBlocks = 264;

// The last block sums what all have found, in their order, and decides.
__device__ inline void decide_together(const Round& r, const Scratch& scratch, const Standing& before) {
  double sums[kSums] = {};
  SECUREAFL_ROLLED
  for (int b = threadIdx.x; b < gridDim.x; b += kJudgeThreads) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __ldcg(&scratch.judged[i * gridDim.x + b]);
  }
  double counts[3] = {};  // factors below this one, corrections capped, given up: exact, far below 2^53
  SECUREAFL_ROLLED
  for (int k = threadIdx.x; k < static_cast<int>(r.n); k += kJudgeThreads) {
    counts[1] += counts_as(r, k, Status::kCapped);
    counts[2] += counts_as(r, k, Status::kFallback);
  }
  block_sums(sums);
  const double factor = factor_of(before, sums);
#pragma unroll 4
  for (int i = threadIdx.x; i < before.held; i += kJudgeThreads) {
    counts[0] += lies_below(r, before, i, factor);
  }
  block_sums(counts);
  if (threadIdx.x != 0) return;
  const auto whole = [](double count) { return static_cast<int64_t>(count); };
  *scratch.verdict = decide(r, before, sums, whole(counts[0]), whole(counts[1]), whole(counts[2]));
}

// What the update is like, in sums over all coordinates. static: one copy per translation unit.
static __global__ void judge_kernel(Round r, Scratch scratch) {
  __shared__ bool last;
  const Standing before = standing_of(r);
  const int bits = __ffs(static_cast<int>(r.columns)) - 1;  // columns: a power of two
  double sums[kSums] = {};
#pragma unroll 2
  for (int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; c < r.d;
       c += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    const float* row = r.last + (((c >> bits) * 2 * r.n + r.client) << bits) + (c & (r.columns - 1));
    const float g = r.update[c];
    const float s = r.trained_on[c] - row[0], y = g - row[r.n << bits];
    sums[kBad] += !isfinite(g);
    sums[kGG] += static_cast<double>(g) * g;
    sums[kYY] += static_cast<double>(y) * y;
    sums[kSS] += static_cast<double>(s) * s;
    sums[kSY] += static_cast<double>(s) * y;
  }
  block_sums(sums);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) scratch.judged[i * gridDim.x + blockIdx.x] = sums[i];
    __threadfence();
    last = atomicInc(r.arrived, gridDim.x - 1) == gridDim.x - 1;  // counts round to zero for the next round
  }
  __syncthreads();
  if (last) decide_together(r, scratch, before);
}

}  // namespace secureafl::cuda
