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
  constexpr int64_t kMost = 256;
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
  constexpr int kBatch = 4;                                 // coordinates that are loaded together
  const int bits = __ffs(static_cast<int>(r.columns)) - 1;  // columns: a power of two
  SECUREAFL_NO_UNROLL
  for (; first < r.d; first += kBatch * stride) {
    float g[kBatch], s[kBatch], y[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t c = first + i * stride;
      const float* row = r.last + (((c >> bits) * 2 * r.n + client) << bits) + (c & (r.columns - 1));
      const bool inside = c < r.d;  // values outside are 0: they change no sum
      g[i] = inside ? r.update[c] : 0.0f;
      s[i] = inside ? r.trained_on[c] - row[0] : 0.0f;
      y[i] = inside ? g[i] - row[r.n << bits] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sums[kNonFinite] += !isfinite(g[i]);
      sums[kGG] += static_cast<double>(g[i]) * g[i];
      sums[kYY] += static_cast<double>(y[i]) * y[i];
      sums[kSS] += static_cast<double>(s[i]) * s[i];
      sums[kSY] += static_cast<double>(s[i]) * y[i];
    }
  }
}

// The parts of one of `blocks` blocks.      judged (kSums, parts)
__device__ inline void sum_update(const Round& r, int parts, int block, int blocks, double* judged,
                                  JudgeMemory& memory) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  const int warps = warp.meta_group_size(), together = warps < kPartsAtOnce * kPartWarps ? 1 : kPartsAtOnce;
  const int32_t client = client_of(r);
  SECUREAFL_NO_UNROLL
  for (int first = block * together; first < parts; first += blocks * together) {
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

// Adds up the values over each warp, into the columns first, .. of memory.totals.
template <int kCount>
__device__ inline void add_up_warps(const int64_t (&values)[kCount], int first, JudgeMemory& memory) {
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t sum = cg::reduce(warp, values[i], cg::plus<int64_t>());
    if (warp.thread_rank() == 0) memory.totals[warp.meta_group_rank()][first + i] = sum;
  }
}

// Run by one block: the verdict, which only thread 0 gets. others, tallied(): the contributions of this thread. tallied
// is called after the census is added up, since it may have to wait for the sums.
template <typename Tallied>
__device__ inline Verdict decide_as_block(const Round& r, const ClientState& before, const double* sums,
                                          const Census& others, JudgeMemory& memory, const Tallied& tallied) {
  constexpr int kTally = Census::kNumbers;  // first column of the tally
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  add_up_warps(others.of, 0, memory);
  const Tally tally = tallied();
  add_up_warps<2>({tally.below, tally.all}, kTally, memory);
  __syncthreads();
  if (warp.meta_group_rank() != 0) return {};
  const int lane = warp.thread_rank(), warps = warp.meta_group_size();
  if (lane < kTally + 2) {
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
  for (int i = 0; i < kTally; ++i) all.of[i] = totals[i];
  return verdict_on(r, before, sums, {totals[kTally], totals[kTally + 1]}, all);
}

// Run by one block: adds up the parts, in order, and decides. Only thread 0 gets the verdict; record_verdict must
// follow, with memory.sums. wait(): returns in every thread when all parts are there; what does not depend on them
// comes before. loaded(): called when the parts are in memory.sums.      judged (kSums, parts)   lists (n)
template <typename Wait, typename Loaded>
__device__ inline Verdict decide_together(const Round& r, const ClientState& before, int parts, const double* judged,
                                          JudgeMemory& memory, FactorList* lists, const Wait& wait,
                                          const Loaded& loaded) {
  constexpr int kBatch = 8;
  const JudgeTeam team;
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  FactorWalk<JudgeTeam, kBatch> walk(team, r, before);
  walk.fetch();
  Tally tally{0, weigh_lists(team, r, before, lists)};
  const Census others = census_of_others(team, r.presence, r.seen, r.n, before.client);
  return decide_as_block(r, before, memory.sums, others, memory, [&] {
    wait();
    SECUREAFL_NO_UNROLL
    for (int i = warp.meta_group_rank(); i < kSums; i += warp.meta_group_size()) {
      const double sum = warp_sum(judged + i * parts, parts);
      if (warp.thread_rank() == 0) memory.sums[i] = sum;
    }
    __syncthreads();  // all threads see the sums and the lists
    loaded();
    const double factor = factor_of(before, memory.sums);
    add_counts(team, r, before, factor, tally);
    tally.below += walk.below(lists, factor);
    return tally;
  });
}

}  // namespace secureafl::cuda
