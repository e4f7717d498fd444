#include <cooperative_groups.h>

#include "common/team.cuh"
#include "round/judge.cuh"
#include "round/launches.h"
#include "round/renew.h"

// The round of a server with several ranks, cut into phases where the ranks add up their sums. Kernels of
// `update_sums`, `apply_` and `renew_`. Each sum has the same order as in the unsharded kernels, so one rank gives the
// same bits as no group.

namespace secureafl::cuda {

// Kernel 1 of `update_sums`, one block per part.      judged (kSums, parts)
static __global__ void update_sums_kernel(Round r, double* judged) {
  __shared__ JudgeMemory memory;
  sum_update(r, gridDim.x, blockIdx.x, gridDim.x, judged, memory);
}

// Kernel 2 of `update_sums`, one warp per sum.      judged (kSums, parts)   out (kSums)
static __global__ void add_up_kernel(const double* judged, int parts, double* out) {
  const double sum = warp_sum(judged + blockIdx.x * parts, parts);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Kernel 1 of `apply_`, one block: the verdict.      sums (kSums)
static __global__ void decide_kernel(Round r, const double* sums, Verdict* verdict) {
  SECUREAFL_SHARED(FactorList, lists);  // (r.lists)
  __shared__ JudgeMemory memory;
  const JudgeTeam team;
  const ClientState before = client_state(r);
  FactorWalk<JudgeTeam, 4> walk(team, r, before);
  walk.fetch();
  Tally tally{0, weigh_lists(team, r, before, lists)};
  const Census others = census_of_others(team, r.presence, r.seen, r.n, before.client);
  const Verdict v = decide_as_block(r, before, sums, others, memory, [&] {
    const double factor = factor_of(before, sums);
    add_counts(team, r, before, factor, tally);
    __syncthreads();  // all threads see the lists
    tally.below += walk.below(lists, factor);
    return tally;
  });
  if (threadIdx.x != 0) return;
  *verdict = v;
  record_verdict(r, before, sums, v);
  push_pair(r, v);
}

// Kernel of `apply_` after the pass. One warp per sum of the pass, one thread per client for its counters.
//   changes (PassSums::count)
static __global__ void collect_kernel(Round r, Scratch scratch, double* changes) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int64_t count = PassSums{r.n, r.m}.count();
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (const int64_t i = thread / 32; i < count) {
    const double sum = warp_sum(scratch.changes + i * scratch.pass_blocks, static_cast<int>(scratch.pass_blocks));
    if (warp.thread_rank() == 0) changes[i] = sum;
  }
  if (thread >= r.n) return;
  const Verdict v = *scratch.verdict;
  if (int64_t* counted = counted_at(r, v, thread)) atomicAdd(reinterpret_cast<unsigned long long*>(counted), 1ull);
  if (thread == v.client && v.stored) r.seen[thread] = true;
}

// Kernel of `renew_`, one warp per client.      changes (PassSums::count)
static __global__ void renew_given_kernel(Round r, const Verdict* verdict, const double* changes) {
  SECUREAFL_SHARED(double, shared);  // (2m + 1): the step times the slots and x of the client; then solve_scratch
  const WarpTeam team;
  const PassSums at{r.n, r.m};
  const int k = blockIdx.x, planes = static_cast<int>(r.planes());
  // slot(2m, k) is x(k)
  for (int j = team.rank(); j <= planes; j += WarpTeam::kSize) shared[j] = changes[at.slot(j, k)];
  team.sync();
  const ClientProducts products = client_products(r, k);
  renew_products(team, r, *verdict, k, products, shared, changes + at.own_x(0));
  solve_client(team, r, k, products, shared + planes + 1);
}

void launch_update_sums(const Launcher& launch, int64_t parts, const Round& r, double* judged, double* out) {
  launch(update_sums_kernel, parts, kPartThreads, 0, r, judged);
  launch(add_up_kernel, kSums, 32, 0, judged, static_cast<int>(parts), out);
}

void launch_decide(const Launcher& launch, const Round& r, const double* sums, Verdict* verdict) {
  launch(decide_kernel, 1, kPartThreads, r.lists * static_cast<int64_t>(sizeof(FactorList)), r, sums, verdict);
}

void launch_collect(const Launcher& launch, const Round& r, const Scratch& scratch, double* changes) {
  constexpr int kThreads = 256;
  const int64_t threads = 32 * PassSums{r.n, r.m}.count();
  launch(collect_kernel, (threads + kThreads - 1) / kThreads, kThreads, 0, r, scratch, changes);
}

void launch_renew(const Launcher& launch, const Round& r, const Verdict* verdict, const double* changes) {
  const int64_t doubles = rows_of(r.m) + solve_scratch(r.m);
  launch(renew_given_kernel, r.n, 32, doubles * static_cast<int64_t>(sizeof(double)), r, verdict, changes);
}

}  // namespace secureafl::cuda
