#pragma once

#include "common/launch.cuh"
#include "coordinate_wise/select.cuh"
#include "round/judge.cuh"
#include "round/members.cuh"
#include "round/pass_shape.cuh"
#include "round/round.h"

namespace secureafl::cuda {

// Kernel 1 of `step_` without pairs, one block per part: sums over the update, then the verdict by the last block.
static __global__ void judge_kernel(Round r, Scratch scratch) {
  SECUREAFL_SHARED(FactorList, lists);  // (r.lists)
  __shared__ JudgeMemory memory;
  __shared__ bool last;
  pdl_trigger();
  const ClientState before = client_state(r);
  sum_update(r, gridDim.x, blockIdx.x, gridDim.x, scratch.judged, memory);
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(r.arrived, gridDim.x - 1) == gridDim.x - 1;  // wraps to zero for the next round
  }
  __syncthreads();
  if (!last) return;
  const Verdict v = decide_together(r, before, gridDim.x, scratch.judged, memory, lists, [] {}, [] {});
  if (threadIdx.x != 0) return;
  *scratch.verdict = v;
  record_verdict(r, before, memory.sums, v);
}

// Threads of a block: a team, or as many teams as make 256. As many blocks as make 1024 threads of a multiprocessor.
template <typename P>
constexpr int kLastThreads = P::kThreads > 256 ? P::kThreads : 256;
template <typename P>
constexpr int kLastBlocksPerSm = 1024 / kLastThreads<P>;

// The pass of a round without pairs, and its last kernel. Every last update is read once, so it goes straight into
// registers; the other warps of a multiprocessor hide the wait. Last models are not read. The history is finite, so
// ColumnRule::key is exact for values from there too.
template <typename P>
__global__ void __launch_bounds__(kLastThreads<P>, kLastBlocksPerSm<P>)
    last_pass_kernel(Round r, const Verdict* verdict) {
  constexpr int kThreads = P::kThreads, kColumns = P::kColumns, kItems = P::kItems, kLanes = P::kLanes;
  constexpr int kAll = kLastThreads<P>;  // of all teams
  __shared__ uint32_t exchange[2 * kThreads / 32], members[(P::kClients + 31) / 32];
  const int n = static_cast<int>(r.n), tiles = static_cast<int>(r.tiles), plane = n * kColumns;
  const int team = threadIdx.x / kThreads, teams = kAll / kThreads, rank = threadIdx.x % kThreads;
  const int lane = rank / kColumns, column = rank % kColumns;
  pdl_wait();
  const Verdict v = *verdict;
  find_members(r, v, P::kClients, members);
  __syncthreads();
  const Lanes<kThreads, kColumns> lanes{exchange};
  const ColumnRule<kLanes, kItems> rule(lanes, lane, [&](int k) { return is_member(members, k); }, r.rule);
  const float inverse_lr = static_cast<float>(1 / r.lr);
  if (v.changes_nothing()) {  // so a flood of rejected updates does not cost a pass each
    for (int64_t c = blockIdx.x * kAll + threadIdx.x; c < r.d; c += gridDim.x * kAll) {
      r.next_model[c] = r.model[c];
    }
    return;
  }
  for (int index = blockIdx.x * teams + team; index < tiles; index += gridDim.x * teams) {
    const int64_t tile = r.backwards ? tiles - 1 - index : index, c = tile * kColumns + column;
    const bool inside = c < r.d;
    float *last_w = r.last + tile * 2 * plane, *last_g = last_w + plane;
    const float received = inside ? r.update[c] * v.clip : 0.0f, model = inside ? r.model[c] : 0.0f;
    uint32_t keys[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int k = lane + i * kLanes;
      keys[i] = rule.key(i, k < n && k != v.client ? last_g[rank + i * kThreads] : received);
    }
    const float guess = inside ? (r.previous[c] - model) * inverse_lr : 0.0f;  // the search starts here
    const float next = stepped(v, model, rule.reduce(lanes, keys, r.rule, r.trim, guess));
    if (lane != 0 || !inside) continue;
    r.next_model[c] = next;
    if (!v.stored) continue;
    last_w[v.client * kColumns + column] = r.trained_on[c];
    last_g[v.client * kColumns + column] = received;
  }
  // No thread reads this entry: whether the update takes part is in the verdict.
  if (blockIdx.x == 0 && threadIdx.x == 0 && v.stored) r.seen[v.client] = true;
}

}  // namespace secureafl::cuda
