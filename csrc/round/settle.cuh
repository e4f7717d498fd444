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

// Kernel of `settle_`, one block, at_once clients at a time.      changes (PassSums::count, blocks)
static __global__ void settle_kernel(Round r, Verdict* verdict, const double* changes, int blocks, int at_once) {
  SECUREAFL_SHARED(double, shared);
  const Verdict v = *verdict;
  if (v.pending == 0) return;
  renew_clients(r, v, changes, blocks, 0, 1, at_once, shared);
  if (threadIdx.x == 0) verdict->pending = 0;
}

inline void launch_settle(const Launcher& launch, const Round& r, Verdict* verdict, const double* changes,
                          int64_t blocks) {
  // 16 pairs of a client take 19 KB: fewer clients at once on a GPU with 99 KB.
  const int64_t each = renew_scratch(static_cast<int>(r.m)) * static_cast<int64_t>(sizeof(double));
  const int64_t fed = launch.max_shared_bytes() / each, at_once = fed < kSettleWarps ? fed : kSettleWarps;
  launch(settle_kernel, 1, 32 * kSettleWarps, at_once * each, r, verdict, changes, static_cast<int>(blocks),
         static_cast<int>(at_once));
}

}  // namespace secureafl::cuda
