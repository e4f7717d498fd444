#pragma once

#include "norm.cuh"
#include "round.cuh"

namespace secureafl::cuda {

__device__ inline int64_t block_count(int64_t value) {
  return static_cast<int64_t>(block_sum(static_cast<double>(value)));  // exact: far below 2^53
}

// The last block sums what all have found, in their order, and decides.
__device__ inline void decide(const Round& r) {
  __shared__ double sums[kSums];
  __shared__ double shared_factor;
  __shared__ bool shared_defined;
  for (int i = 0; i < kSums; ++i) {
    double sum = 0;
    for (int b = threadIdx.x; b < gridDim.x; b += blockDim.x) sum += __ldcg(&r.judged[i * gridDim.x + b]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[i] = sum;
  }
  const bool known = r.seen[r.client];
  if (threadIdx.x == 0) {
    shared_defined = has_factor(sums, known);
    shared_factor = shared_defined ? lipschitz_factor(sums[kYY], sums[kSS]) : nan("");
    if (shared_defined) r.seen_factors[*r.recorded % r.room] = shared_factor;
  }
  __syncthreads();
  const double factor = shared_factor;
  const int64_t recorded = *r.recorded + shared_defined, size = recorded < r.room ? recorded : r.room;
  int64_t below = 0, capped = 0, fallbacks = 0;
  for (int64_t i = threadIdx.x; i < size; i += blockDim.x) below += r.seen_factors[i] < factor;
  for (int64_t k = threadIdx.x; k < r.n; k += blockDim.x) {
    if (k == r.client || !r.seen[k] || !r.estimate) continue;
    capped += r.status[k] == Status::kCapped;
    fallbacks += r.status[k] == Status::kFallback;
  }
  below = block_count(below);
  capped = block_count(capped);
  fallbacks = block_count(fallbacks);
  if (threadIdx.x != 0) return;

  Verdict v{};
  v.reason = judge(sums, known, r.filter, below, size, r.quantile);
  const bool accepted = accepts(v.reason), finite = v.reason != Reason::kNotFinite;
  v.received = accepted && r.receive;
  v.stored = r.store_all ? finite : accepted;
  v.pushed = v.stored && known && has_curvature(sums);
  v.clip = known ? 1.0f : static_cast<float>(fmin(1.0, r.max_norm / sqrt(sums[kGG])));
  v.g_square = sums[kGG] * v.clip * v.clip;
  int64_t &pairs = r.pairs[r.client], &oldest = r.oldest[r.client];
  v.slot = static_cast<int32_t>(pairs < r.m ? pairs : oldest);
  if (v.pushed) {
    if (pairs < r.m) {
      ++pairs;
    } else {
      oldest = (oldest + 1) % r.m;
    }
  }
  *r.verdict = v;
  *r.recorded = recorded;
  *r.accepted = accepted;
  *r.factor = factor;
  *r.reason = v.reason;
  r.counts[0] += accepted;
  r.counts[1] += !accepted;
  r.counts[2] += !finite;
  r.counts[3] += capped;
  r.counts[4] += fallbacks;
}

// What the update is like, in sums over all coordinates. static: one copy per translation unit.
static __global__ void judge_kernel(Round r) {
  __shared__ bool last;
  const int64_t planes = 2 * r.m + 2;
  double sums[kSums] = {};
  for (int64_t c = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; c < r.d;
       c += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    const float* last = r.history + (c * r.n + r.client + 1) * planes - 2;  // w, then g
    const float g = r.update[c];
    const float s = r.trained_on[c] - last[0], y = g - last[1];
    sums[kBad] += !isfinite(g);
    sums[kGG] += static_cast<double>(g) * g;
    sums[kYY] += static_cast<double>(y) * y;
    sums[kSS] += static_cast<double>(s) * s;
    sums[kSY] += static_cast<double>(s) * y;
  }
  for (int i = 0; i < kSums; ++i) {
    const double sum = block_sum(sums[i]);
    if (threadIdx.x == 0) r.judged[i * gridDim.x + blockIdx.x] = sum;
  }
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(r.arrived, gridDim.x - 1) == gridDim.x - 1;  // counts round to zero for the next round
  }
  __syncthreads();
  if (last) decide(r);
}

}  // namespace secureafl::cuda
