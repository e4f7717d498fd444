#pragma once

#include "common/launch.cuh"
#include "common/team.cuh"
#include "round/renew.cuh"

// Kernels between rounds.

namespace secureafl::cuda {

// Kernel of `refresh_`, one warp per client.
static __global__ void refresh_kernel(Round r) {
  SECUREAFL_SHARED(double, shared);
  solve_client(WarpTeam(), r, blockIdx.x, client_products(r, blockIdx.x), shared);
}

constexpr int kSettleWarps = 16;

// Kernel of `settle_`, one block.      changes (PassSums::count, blocks)
static __global__ void settle_kernel(Round r, Verdict* verdict, const double* changes, int blocks) {
  SECUREAFL_SHARED(double, shared);
  const Verdict v = *verdict;
  if (v.pending == 0) return;
  renew_clients(r, v, changes, blocks, 0, 1, kSettleWarps, shared);
  if (threadIdx.x == 0) verdict->pending = 0;
}

inline void launch_settle(const Launcher& launch, const Round& r, Verdict* verdict, const double* changes,
                          int64_t blocks) {
  const int64_t doubles = kSettleWarps * renew_scratch(static_cast<int>(r.m));
  launch(settle_kernel, 1, 32 * kSettleWarps, doubles * static_cast<int64_t>(sizeof(double)), r, verdict, changes,
         static_cast<int>(blocks));
}

}  // namespace secureafl::cuda
