#pragma once

#include "common/meeting_team.cuh"
#include "row_wise/kinship/kin_step.cuh"
#include "row_wise/support/refresh.h"

// A refresh on a GPU: a kernel after those of a round. In all but every `every`-th round it returns at once. Few
// clients: one block, with as many of its tables in shared memory as fit. Many clients: blocks that wait for each
// other.

namespace secureafl::cuda {

constexpr int kRefreshBlocks = 64;    // for many clients; a block of 1024 threads fits on every multiprocessor
constexpr int64_t kFewClients = 128;  // up to here one block is faster: its barriers take a tenth of the time
using ManyTeam = MeetingTeam<kRefreshBlocks>;

// Where a refresh runs, and its scratch memory in doubles.
struct RefreshPlan {
  int64_t n, blocks;
  int64_t room = 0;  // doubles of shared memory, of a single block

  static RefreshPlan of(const Launcher& launch, int64_t n) {
    constexpr int64_t kOwn = 1024;  // bytes that are reserved by the system, and static
    const bool many = n > kFewClients && launch.multiprocessors() >= kRefreshBlocks && !launch.shares_gpu();
    if (many) return {n, kRefreshBlocks};
    const int64_t most = (launch.max_shared_bytes() - kOwn) / static_cast<int64_t>(sizeof(double));
    RefreshPlan plan{n, 1};
    plan.room = plan.tables() < most ? plan.tables() : most;
    return plan;
  }
  int64_t tables() const { return RefreshTables::doubles(n, blocks * BlockTeam::kDown); }
  int64_t doubles() const { return tables() + (n + 7) / 8 + 1; }
};

struct RefreshScratch {
  double* tables;     // (RefreshPlan::tables())
  bool* counts;       // (n): clients that count
  unsigned* barrier;  // (): barrier counter of the blocks of a team

  RefreshScratch(double* at, const RefreshPlan& plan)
      : tables(at),
        counts(reinterpret_cast<bool*>(at + plan.tables())),
        barrier(reinterpret_cast<unsigned*>(at + plan.tables() + (plan.n + 7) / 8)) {}
};

template <typename Team>
__device__ inline Team team_of(const RefreshScratch& scratch) {
  if constexpr (Team::kDown == BlockTeam::kDown) {
    return {};
  } else {
    return {scratch.barrier};
  }
}

// From the averages of `args` to the shifts.
template <typename Team>
__device__ inline void refresh_clients(const Team& team, const KinRound& r, Refresh args, const RefreshScratch& scratch,
                                       int64_t room) {
  for (int64_t k = team.rank(); k < r.n; k += Team::kSize) scratch.counts[k] = r.presence.counts(r.seen[k], k);
  team.sync();
  args.counts = scratch.counts;
  refresh(team, args, RefreshTables({scratch.tables, &shared_memory<double>(), room}, r.n, Team::kDown));
}

// Kernel 4 of a round of rule "support". It returns at once in a round without a refresh.
template <typename Team>
static __global__ void __launch_bounds__(BlockTeam::kSize)
    support_refresh_kernel(KinRound r, Refresh args, int64_t every, RefreshScratch scratch, int64_t room) {
  pdl_wait();
  if (*r.rounds % every != 0) return;
  refresh_clients(team_of<Team>(scratch), r, args, scratch, room);
}

// Launches `few` with one block or `many` with plan.blocks: two kernels that differ in their team.
template <typename... Params, typename... Args>
void launch_refresh_kernel(const Launcher& launch, const RefreshPlan& plan, void (*few)(Params...),
                           void (*many)(Params...), const Args&... args) {
  if (plan.blocks > 1) return launch.launch_cooperative(many, plan.blocks, BlockTeam::kSize, 0, args...);
  launch.launch_pdl(few, 1, BlockTeam::kSize, plan.room * static_cast<int64_t>(sizeof(double)), args...);
}

}  // namespace secureafl::cuda
