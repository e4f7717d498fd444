#pragma once

#include "common/reduce.cuh"
#include "round/judge.h"
#include "round/launches.h"
#include "round/quantile.h"
#include "round/tiles.h"

namespace secureafl::cuda {

// The sums over an update are made in parts, each by 8 warps. Which coordinates belong to a part does not depend on the
// grid, so that every kernel makes the same bits.
constexpr int kPartWarps = 8, kPartThreads = 32 * kPartWarps;
constexpr int kPartsAtOnce = 2;     // of a block with enough warps
constexpr int kMaxJudgeWarps = 16;  // of a block that decides

inline int64_t judge_parts(int64_t d) {
  constexpr int64_t kMost = 264;
  const int64_t wanted = (d + kPartThreads - 1) / kPartThreads;
  return wanted < 1 ? 1 : wanted < kMost ? wanted : kMost;
}

// Shared memory of a block that judges.
struct JudgeMemory {
  double of_warps[kPartsAtOnce * kPartWarps][kSums];
  double sums[kSums];
  int64_t totals[kMaxJudgeWarps][2 + Census::kNumbers];
};

// The threads of a block, however many.
struct JudgeTeam {
  __device__ int size() const { return static_cast<int>(blockDim.x); }
  __device__ int rank() const { return threadIdx.x; }
};

// sums (kSums) += sums over the coordinates first, first + stride, ..
__device__ __forceinline__ void add_coordinates(const Round& r, int32_t client, int64_t first, int64_t stride,
                                                double (&sums)[kSums]) {
  const int bits = __ffs(static_cast<int>(r.columns)) - 1;  // columns: a power of two
#pragma unroll 2
  for (int64_t c = first; c < r.d; c += stride) {
    const float* row = r.last + (((c >> bits) * 2 * r.n + client) << bits) + (c & (r.columns - 1));
    const float g = r.update[c];
    const float s = r.trained_on[c] - row[0], y = g - row[r.n << bits];
    sums[kNonFinite] += !isfinite(g);
    sums[kGG] += static_cast<double>(g) * g;
    sums[kYY] += static_cast<double>(y) * y;
    sums[kSS] += static_cast<double>(s) * s;
    sums[kSY] += static_cast<double>(s) * y;
  }
}

// The parts of this block.      judged (kSums, parts)
__device__ inline void sum_update(const Round& r, int parts, double* judged, JudgeMemory& memory) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int warps = warp.meta_group_size(), together = warps < kPartsAtOnce * kPartWarps ? 1 : kPartsAtOnce;
  const int32_t client = client_of(r);
  SECUREAFL_NO_UNROLL
  for (int first = blockIdx.x * together; first < parts; first += gridDim.x * together) {
    SECUREAFL_NO_UNROLL
    for (int i = warp.meta_group_rank(); i < together * kPartWarps; i += warps) {
      const int part = first + i / kPartWarps;
      if (part >= parts) continue;
      const int thread = i % kPartWarps * 32 + warp.thread_rank();
      double sums[kSums] = {};
      add_coordinates(r, client, static_cast<int64_t>(part) * kPartThreads + thread,
                      static_cast<int64_t>(parts) * kPartThreads, sums);
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const double sum = cg::reduce(warp, sums[j], cg::plus<double>());
        if (warp.thread_rank() == 0) memory.of_warps[i][j] = sum;
      }
    }
    __syncthreads();
    const int part = threadIdx.x / kSums, j = threadIdx.x % kSums;
    if (part < together && first + part < parts) {
      double sum = 0;
#pragma unroll
      for (int i = 0; i < kPartWarps; ++i) sum += memory.of_warps[part * kPartWarps + i][j];
      judged[j * parts + first + part] = sum;
    }
    __syncthreads();
  }
}

// The verdict, from the contributions of all threads of a block to the tally and to the census of the other clients.
// Only thread 0 gets it.
__device__ inline Verdict decide_as_block(const Round& r, const ClientState& before, const double* sums,
                                          const Tally& tally, const Census& others, JudgeMemory& memory) {
  constexpr int kCount = 2 + Census::kNumbers;
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  int64_t values[kCount] = {tally.below, tally.all};
#pragma unroll
  for (int i = 2; i < kCount; ++i) values[i] = others.of[i - 2];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t part = cg::reduce(warp, values[i], cg::plus<int64_t>());
    if (warp.thread_rank() == 0) memory.totals[warp.meta_group_rank()][i] = part;
  }
  __syncthreads();
  if (warp.meta_group_rank() != 0) return {};
  const int lane = warp.thread_rank(), warps = warp.meta_group_size();
  if (lane < kCount) {
    int64_t total = 0;
#pragma unroll
    for (int w = 0; w < kMaxJudgeWarps; ++w) total += w < warps ? memory.totals[w][lane] : 0;
    memory.totals[0][lane] = total;
  }
  __syncwarp();
  if (lane != 0) return {};
  const int64_t* totals = memory.totals[0];
  Census all{};
#pragma unroll
  for (int i = 2; i < kCount; ++i) all.of[i - 2] = totals[i];
  return decide(r, before, sums, {totals[0], totals[1]}, all);
}

// Run by one block: adds up the parts, in order, and decides. Only thread 0 gets the verdict. wait(): returns in every
// thread when all parts are there; what does not depend on them comes before.      judged (kSums, parts)   lists (n)
template <typename Wait>
__device__ inline Verdict decide_together(const Round& r, const ClientState& before, int parts, const double* judged,
                                          JudgeMemory& memory, FactorList* lists, const Wait& wait) {
  constexpr int kBatch = 8;
  const JudgeTeam team;
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  FactorWalk<JudgeTeam, kBatch> walk(team, r, before);
  walk.fetch();
  Tally tally{0, weigh_lists(team, r, before, lists)};
  const Census others = census_of_others(team, r.presence, r.seen, r.n, before.client);
  wait();
  SECUREAFL_NO_UNROLL
  for (int i = warp.meta_group_rank(); i < kSums; i += warp.meta_group_size()) {
    const double sum = warp_sum(judged + i * parts, parts);
    if (warp.thread_rank() == 0) memory.sums[i] = sum;
  }
  __syncthreads();  // all threads see the sums and the lists
  const double factor = factor_of(before, memory.sums);
  add_counts(team, r, before, factor, tally);
  tally.below += walk.below(lists, factor);
  SECUREAFL_NO_UNROLL
  while (walk.more()) {
    walk.fetch();
    tally.below += walk.below(lists, factor);
  }
  return decide_as_block(r, before, memory.sums, tally, others, memory);
}

}  // namespace secureafl::cuda
