#pragma once

#include "common/block_team.cuh"
#include "common/launch.cuh"
#include "row_wise/sketch/choose.h"
#include "row_wise/sketch/sketch.h"

// The kernels of `sketch_step_` (sketch.h). One block decides; the passes over d, over Q and over the clients' presence
// have many. Every kernel waits for the one before, so each sees the results of all before it.

namespace secureafl::cuda {

constexpr int kBucketThreads = 256;

// Distribution of the places over threads: each thread processes one bucket in one slice of the rows.
struct SketchPlan {
  int64_t slices, length;

  static SketchPlan of(int64_t rows, int64_t k) {
    constexpr int64_t kLeast = 1 << 16, kMost = 1 << 18, kEach = 128;  // threads; places of one, if the vector is long
    const int64_t wanted = rows * k / kEach, threads = wanted < kLeast ? kLeast : wanted > kMost ? kMost : wanted;
    const int64_t most = threads > k ? threads / k : 1, length = (rows + most - 1) / most;
    return {(rows + length - 1) / length, length};
  }
};

// All threads of some blocks, as one team.
struct GridTeam : BlockTeam {
  static constexpr int kBlocks = 32, kSize = kBlocks * BlockTeam::kSize;
  __device__ int size() const { return kSize; }
  __device__ int rank() const { return blockIdx.x * BlockTeam::kSize + threadIdx.x; }
};

// Counts of one block of a GridTeam: the factors below and all factors that are counted by key (round/factor_counts.h);
// the weight of those that are held, the clients with a row, the numbers of Census.
enum { kBelow, kCounted, kHeld, kRows, kCensus, kCounts = kCensus + Census::kNumbers };

// Results of a kernel for the next ones.
struct SketchScratch {
  double* parts;      // (slices, kBucketSums, k)
  double* judged;     // (kSums)
  int64_t* counts;    // (kCounts, blocks of a GridTeam)
  FactorList* lists;  // (lists of Q)
  uint64_t* keys;     // (n)
  SketchStep* step;   // ()
  float* sketches;    // (2, k)

  static int64_t doubles(const SketchRound& r, const SketchPlan& plan) {
    return plan.slices * kBucketSums * r.k + kSums + kCounts * GridTeam::kBlocks + r.lists + r.n + kStep + r.k;
  }

  SketchScratch(double* at, const SketchRound& r, const SketchPlan& plan)
      : parts(at),
        judged(parts + plan.slices * kBucketSums * r.k),
        counts(reinterpret_cast<int64_t*>(judged + kSums)),
        lists(reinterpret_cast<FactorList*>(counts + kCounts * GridTeam::kBlocks)),
        keys(reinterpret_cast<uint64_t*>(lists + r.lists)),
        step(reinterpret_cast<SketchStep*>(keys + r.n)),
        sketches(reinterpret_cast<float*>(reinterpret_cast<double*>(step) + kStep)) {}

 private:
  static constexpr int64_t kStep = (sizeof(SketchStep) + sizeof(double) - 1) / sizeof(double);
};

// Kernel 1: sums over the places of each bucket, in slices.
static __global__ void __launch_bounds__(kBucketThreads)
    sketch_sums_kernel(SketchRound r, SketchPlan plan, SketchScratch scratch) {
  pdl_trigger();
  const int64_t thread = blockIdx.x * static_cast<int64_t>(kBucketThreads) + threadIdx.x;
  const int64_t slice = thread / r.k, b = thread % r.k;
  if (slice >= plan.slices) return;
  const int64_t begin = slice * plan.length, end = begin + plan.length < r.rows ? begin + plan.length : r.rows;
  double sums[kBucketSums] = {};
#pragma unroll 4
  for (int64_t row = begin; row < end; ++row) add_place(r, row * r.k + b, sums);
#pragma unroll
  for (int i = 0; i < kBucketSums; ++i) scratch.parts[(slice * kBucketSums + i) * r.k + b] = sums[i];
}

// Stores the sums of one block in the counts from `first` on.
template <int kCount>
__device__ inline void store_counts(const SketchScratch& scratch, int first, int64_t (&values)[kCount]) {
  const BlockTeam block;
  block.sum_all(values);
  if (block.rank() != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scratch.counts[(first + i) * GridTeam::kBlocks + blockIdx.x] = values[i];
}

// Kernel 2, a GridTeam: weights of the lists of Q, and counts of the other clients. They do not depend on the update.
static __global__ void __launch_bounds__(BlockTeam::kSize) sketch_count_kernel(SketchRound r, SketchScratch scratch) {
  pdl_trigger();
  const GridTeam team;
  const ClientState before = client_state(r);
  int64_t held_and_rows[] = {weigh_lists(team, r, before, scratch.lists), 0};
  SECUREAFL_NO_UNROLL
  for (int64_t k = team.rank(); k < r.n; k += GridTeam::kSize) held_and_rows[1] += r.seen[k] && k != before.client;
  Census others = census_of_others(team, r.presence, r.seen, r.n, before.client);
  store_counts(scratch, kHeld, held_and_rows);
  store_counts(scratch, kCensus, others.of);
  pdl_wait();
}

// Kernel 3, one block: the sketches, and the sums of the judge.
static __global__ void __launch_bounds__(BlockTeam::kSize)
    sketch_finish_kernel(SketchRound r, int64_t slices, SketchScratch scratch) {
  pdl_trigger();
  pdl_wait();
  const BlockTeam team;
  const int64_t client = client_of(r);
  double judged[kSums] = {};
  SECUREAFL_NO_UNROLL
  for (int64_t b = team.rank(); b < r.k; b += BlockTeam::kSize) {
    double sums[kBucketSums] = {};
#pragma unroll 4
    for (int64_t slice = 0; slice < slices; ++slice) {
#pragma unroll
      for (int i = 0; i < kBucketSums; ++i) sums[i] += scratch.parts[(slice * kBucketSums + i) * r.k + b];
    }
    finish_bucket(r, client, b, sums, scratch.sketches, judged);
  }
  team.sum_all(judged);
  if (team.rank() != 0) return;
  judged[kNonFinite] = non_finite(judged);
#pragma unroll
  for (int i = 0; i < kSums; ++i) scratch.judged[i] = judged[i];
}

// Kernel 4, a GridTeam: the factors of Q below that of the update.
static __global__ void __launch_bounds__(BlockTeam::kSize) sketch_tally_kernel(SketchRound r, SketchScratch scratch) {
  pdl_trigger();
  const ClientState before = client_state(r);
  FactorWalk<GridTeam, 8> walk(GridTeam(), r, before);
  walk.fetch();  // before the wait: no kernel of this round has written to Q yet
  pdl_wait();
  const double factor = factor_of(before, scratch.judged);
  Tally tally{};
  add_counts(GridTeam(), r, before, factor, tally);
  tally.below += walk.below(scratch.lists, factor);
  int64_t below_and_counted[] = {tally.below, tally.all};
  store_counts(scratch, kBelow, below_and_counted);
}

// Kernel 5, one block: choose_step.
static __global__ void __launch_bounds__(BlockTeam::kSize) sketch_choose_kernel(SketchRound r, SketchScratch scratch) {
  __shared__ Bins bins;
  __shared__ SketchStep step;
  pdl_trigger();
  pdl_wait();
  const BlockTeam team;
  int64_t counts[kCounts];
#pragma unroll
  for (int i = 0; i < kCounts; ++i) {
    counts[i] = team.rank() < GridTeam::kBlocks ? scratch.counts[i * GridTeam::kBlocks + team.rank()] : 0;
  }
  team.sum_all(counts);
  Totals totals{{counts[kBelow], counts[kCounted] + counts[kHeld]}, counts[kRows], {}};
#pragma unroll
  for (int i = 0; i < Census::kNumbers; ++i) totals.others.of[i] = counts[kCensus + i];
  choose_step(team, r, scratch.judged, totals, scratch.sketches, scratch.keys, &bins, &step);
  team.sync();
  if (team.rank() == 0) *scratch.step = step;
}

// Kernel 6: the next model.
static __global__ void __launch_bounds__(kBucketThreads) sketch_step_kernel(SketchRound r, const SketchStep* chosen) {
  pdl_wait();
  const int64_t c = blockIdx.x * static_cast<int64_t>(kBucketThreads) + threadIdx.x;
  if (c < r.d) r.next_model[c] = next_value(r, *chosen, c);
}

// All kernels of a round. scratch (SketchScratch::doubles)
inline void launch_sketch_step(const Launcher& launch, const SketchRound& r, const SketchPlan& plan, double* memory) {
  const SketchScratch scratch(memory, r, plan);
  const auto blocks = [](int64_t threads) { return (threads + kBucketThreads - 1) / kBucketThreads; };
  launch(sketch_sums_kernel, blocks(plan.slices * r.k), kBucketThreads, 0, r, plan, scratch);
  launch.launch_pdl(sketch_count_kernel, GridTeam::kBlocks, BlockTeam::kSize, 0, r, scratch);
  launch.launch_pdl(sketch_finish_kernel, 1, BlockTeam::kSize, 0, r, plan.slices, scratch);
  launch.launch_pdl(sketch_tally_kernel, GridTeam::kBlocks, BlockTeam::kSize, 0, r, scratch);
  launch.launch_pdl(sketch_choose_kernel, 1, BlockTeam::kSize, 0, r, scratch);
  launch.launch_pdl(sketch_step_kernel, blocks(r.d), kBucketThreads, 0, r,
                    static_cast<const SketchStep*>(scratch.step));
}

}  // namespace secureafl::cuda
