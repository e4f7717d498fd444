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

// The start of a round in one kernel, up to its verdict. The last block decides. The others judge the update, and renew
// the clients of the last round if it is pending; a block that is alone does everything. All blocks must run at once
// (cooperative launch). load_factors(): loads the factors of all clients into `shared`; called when all are renewed.
// start_copies(): starts the copies of the first tiles; called as late as possible, because the loads of all blocks
// would queue behind the tiles.
template <typename P, typename Load, typename Start>
__device__ inline Verdict begin_round(const Round& r, const Scratch& scratch, char* shared, const Load& load_factors,
                                      const Start& start_copies) {
  static_assert(P::kMaxThreads <= 32 * kMaxJudgeWarps, "JudgeMemory has room for so many");
  auto& memory = *reinterpret_cast<JudgeMemory*>(shared);
  auto* lists = reinterpret_cast<FactorList*>(&memory + 1);         // (kClients)
  auto* renewing = reinterpret_cast<double*>(lists + P::kClients);  // (kRenewedAtOnce, renew_scratch)
  const int blocks = gridDim.x, block = blockIdx.x, parts = static_cast<int>(scratch.parts);
  const int helpers = blocks > 1 ? blocks - 1 : 1, renewers = r.n < helpers ? static_cast<int>(r.n) : helpers;
  const bool decides = block == blocks - 1;
  unsigned *judged = r.arrived, *rounds = r.arrived + 1;
  const unsigned next = threadIdx.x == 0 ? load_acquire(rounds) + 1 : 0;
  unsigned *renewed = r.arrived + 2 + next % 2, *renewed_next = r.arrived + 2 + (next + 1) % 2;
  const Verdict last = *scratch.verdict;
  const ClientState before = client_state(r);
  if (block < helpers) {
    sum_update(r, parts, block, helpers, scratch.judged, memory);
    __syncthreads();  // all threads have read the last verdict
    if (threadIdx.x == 0) arrive(judged);
  }
  if (last.pending != 0 && block < renewers) {
    renew_clients(r, last, scratch.changes, static_cast<int>(scratch.pass_blocks), block, renewers, P::kRenewedAtOnce,
                  renewing);
    if (threadIdx.x == 0) arrive(renewed);
  }
  if (decides) {
    const auto wait = [&] {
      if (threadIdx.x == 0) wait_until(judged, helpers);
      __syncthreads();
    };
    Verdict v = decide_together(r, before, parts, scratch.judged, memory, lists, wait, start_copies);
    if (threadIdx.x == 0) {
      *judged = *renewed_next = 0;  // not read before the next round
      v.pending = 1;
      if (last.pending != 0) v.last_rate = last.rate;
      *scratch.verdict = v;
      publish(rounds, next);
      record_verdict(r, before, memory.sums, v);
    }
  }
  if (threadIdx.x == 0) wait_until(renewed, last.pending != 0 ? renewers : 0);
  __syncthreads();
  load_factors();
  if (!decides) start_copies();
  if (threadIdx.x == 0) wait_until(rounds, next);
  __syncthreads();
  Verdict v = *scratch.verdict;
  v.client = static_cast<int32_t>(clamped(v.client, 0, r.n - 1));  // if a wait has given up, this is the last verdict
  v.slot = static_cast<int32_t>(clamped(v.slot, 0, r.m - 1));
  return v;
}

// Writes the state that the next round needs, besides the history and the sums of the pass. Run by one warp of every
// block, when no block renews any more. Nothing that is written here is read in the rest of the round.
__device__ inline void end_round(const Round& r, const Verdict& v) {
  const int lane = WarpTeam().rank();
  SECUREAFL_NO_UNROLL
  for (int k = blockIdx.x * WarpTeam::kSize + lane; k < static_cast<int>(r.n); k += gridDim.x * WarpTeam::kSize) {
    if (int64_t* count = counted_at(r, v, k)) atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ull);
  }
  if (blockIdx.x != gridDim.x - 1 || lane != 0) return;
  push_pair(r, v);
  if (v.stored) r.seen[v.client] = true;
}

}  // namespace secureafl::cuda
