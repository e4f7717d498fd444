#pragma once

#include "kinship/kin_step.cuh"
#include "support/refresh.h"

namespace secureafl::cuda {

// Kernel 4 of a round of rule "support", one block: a refresh in every `every`-th round, otherwise nothing. It is short
// beside the rounds that it serves.     scratch (RefreshTables::doubles(n))    counts (n)
static __global__ void __launch_bounds__(BlockTeam::kSize)
    support_refresh_kernel(KinRound r, Refresh refresh_args, int64_t every, double* scratch, bool* counts) {
  pdl_wait();
  if (*r.rounds % every != 0) return;
  const BlockTeam team;
  for (int64_t k = team.rank(); k < r.n; k += BlockTeam::kSize) counts[k] = r.presence.counts(r.seen[k], k);
  team.sync();
  refresh_args.counts = counts;
  refresh(team, refresh_args, RefreshTables(scratch, r.n));
}

}  // namespace secureafl::cuda
