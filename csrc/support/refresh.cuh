#pragma once

#include "kinship/kin_step.cuh"
#include "support/refresh.h"

namespace secureafl::cuda {

// Doubles of shared memory for the tables of a refresh: all of them, or as many as a block may have.
inline int64_t refresh_room(int64_t n, int64_t max_shared_bytes) {
  constexpr int64_t kOwn = 1024;  // reserved by the system, and static
  const int64_t most = (max_shared_bytes - kOwn) / static_cast<int64_t>(sizeof(double));
  return RefreshTables::doubles(n) < most ? RefreshTables::doubles(n) : most;
}

// Kernel 4 of a round of rule "support", one block: a refresh in every `every`-th round, otherwise nothing. It is short
// beside the rounds that it serves.     scratch (RefreshTables::doubles(n))    room: doubles in shared memory    counts
// (n)
static __global__ void __launch_bounds__(BlockTeam::kSize)
    support_refresh_kernel(KinRound r, Refresh refresh_args, int64_t every, double* scratch, int64_t room,
                           bool* counts) {
  pdl_wait();
  if (*r.rounds % every != 0) return;
  const BlockTeam team;
  for (int64_t k = team.rank(); k < r.n; k += BlockTeam::kSize) counts[k] = r.presence.counts(r.seen[k], k);
  team.sync();
  refresh_args.counts = counts;
  refresh(team, refresh_args, RefreshTables({scratch, &shared_memory<double>(), room}, r.n));
}

}  // namespace secureafl::cuda
