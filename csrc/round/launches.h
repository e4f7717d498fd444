#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "round/round.h"

// Functions that ops_cuda.cu calls in other files: pass_float.cu and pass_half.cu (one per type of the stored pairs),
// pass_last.cu (without pairs) and sharded.cu.

namespace secureafl::cuda {

// Buffers between the blocks and kernels of a round.
struct Scratch {
  double* judged;    // (kSums, parts)
  int64_t parts;     // see judge.cuh; 0 if the verdict is given
  Verdict* verdict;  // ()
  double* changes;   // (PassSums::count, pass blocks)
  int64_t pass_blocks;
};

// Launch configuration of the pass.
struct PassPlan {
  int64_t blocks, threads, shared_bytes;
};

// S: float or __half. min_shared_bytes: bytes of shared memory that the pass needs at least.
template <typename S>
int64_t min_shared_bytes(int64_t n, int64_t m);
template <typename S>
PassPlan plan_pass(const Launcher& launch, const Round& r);
template <typename S>
void launch_pass(const Launcher& launch, const PassPlan& plan, const Round& r, const Scratch& scratch);

// Without pairs: both kernels of a round. In a round of several ranks the verdict is made elsewhere.
void launch_judge(const Launcher& launch, const Round& r, const Scratch& scratch);
void launch_last_pass(const Launcher& launch, const Round& r, const Verdict* verdict);

// judged (kSums, parts)   out, sums (kSums)   changes (PassSums::count)
void launch_update_sums(const Launcher& launch, int64_t parts, const Round& r, double* judged, double* out);
void launch_decide(const Launcher& launch, const Round& r, const double* sums, Verdict* verdict);
void launch_collect(const Launcher& launch, const Round& r, const Scratch& scratch, double* changes);
void launch_renew(const Launcher& launch, const Round& r, const Verdict* verdict, const double* changes);

}  // namespace secureafl::cuda
