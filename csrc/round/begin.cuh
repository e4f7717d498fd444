#pragma once

#include "common/meet.cuh"
#include "round/judge.cuh"
#include "round/launches.h"
#include "round/renew.cuh"

namespace secureafl::cuda {

// Shared memory of begin_round: JudgeMemory, lists (clients), scratch (at_once, renew_scratch).
constexpr int begin_bytes(int clients, int m, int at_once) {
  const int doubles = at_once * renew_scratch(m);
  return static_cast<int>(sizeof(JudgeMemory) + clients * sizeof(FactorList) + doubles * sizeof(double));
}

// The start of a round in one kernel, up to its verdict: all blocks judge the update and renew the clients of the last
// round, if it is pending. The last block renews none, unless it is the only one: it decides meanwhile. The others wait
// for it. All blocks must run at once (cooperative launch). start_copies(): starts those of the first tiles. Loads that
// are waited for come before it: they would queue behind the tiles.
template <typename P, typename Start>
__device__ inline Verdict begin_round(const Round& r, const Scratch& scratch, char* shared, const Start& start_copies) {
  static_assert(P::kMaxThreads <= 32 * kMaxJudgeWarps, "JudgeMemory has room for so many");
  auto& memory = *reinterpret_cast<JudgeMemory*>(shared);
  auto* lists = reinterpret_cast<FactorList*>(&memory + 1);        // (kClients)
  auto* renewal = reinterpret_cast<double*>(lists + P::kClients);  // (kRenewedAtOnce, renew_scratch)
  unsigned *judged = r.arrived, *renewed = r.arrived + 1, *rounds = r.arrived + 2;
  const int blocks = gridDim.x, block = blockIdx.x, parts = static_cast<int>(scratch.parts);
  const int renewers = blocks > 1 ? blocks - 1 : 1, with_clients = r.n < renewers ? static_cast<int>(r.n) : renewers;
  const unsigned next = threadIdx.x == 0 ? load_acquire(rounds) + 1 : 0;
  const Verdict last = *scratch.verdict;
  const ClientState before = client_state(r);
  sum_update(r, parts, scratch.judged, memory);
  __syncthreads();  // all threads have read the last verdict
  if (threadIdx.x == 0) arrive(judged);
  if (last.pending != 0 && block < with_clients) {
    renew_clients(r, last, scratch.changes, static_cast<int>(scratch.pass_blocks), block, renewers, P::kRenewedAtOnce,
                  renewal);
    if (threadIdx.x == 0) arrive(renewed);
  }
  if (block == blocks - 1) {
    Verdict v = decide_together(r, before, parts, scratch.judged, memory, lists, [&] {
      if (threadIdx.x == 0) wait_until(judged, blocks);
      __syncthreads();
    });
    if (threadIdx.x == 0) {
      wait_until(renewed, last.pending != 0 ? with_clients : 0);
      *judged = *renewed = 0;
      v.pending = 1;
      if (last.pending != 0) v.last_rate = last.rate;
      *scratch.verdict = v;
      publish(rounds, next);
    }
    __syncthreads();
  }
  start_copies();
  if (threadIdx.x == 0) wait_until(rounds, next);
  __syncthreads();
  Verdict v = *scratch.verdict;
  v.client = static_cast<int32_t>(clamped(v.client, 0, r.n - 1));  // if a wait has given up, this is the last verdict
  v.slot = static_cast<int32_t>(clamped(v.slot, 0, r.m - 1));
  return v;
}

// What the round leaves for the next one, besides the history and the sums of the pass. Run by one warp, when no block
// renews any more. Nothing that is written here is read in the rest of the round.
__device__ inline void end_round(const Round& r, const Verdict& v) {
  const WarpTeam warp;
  SECUREAFL_NO_UNROLL
  for (int k = warp.rank(); k < static_cast<int>(r.n); k += WarpTeam::kSize) {
    if (int64_t* count = counted_at(r, v, k)) atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ull);
  }
  if (warp.rank() != 0) return;
  push_pair(r, v);
  if (v.stored) r.seen[v.client] = true;
}

}  // namespace secureafl::cuda
