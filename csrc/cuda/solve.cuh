#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "products.cuh"
#include "round.cuh"

namespace secureafl::cuda {

namespace cg = cooperative_groups;

// One warp's sum over the blocks of the pass, the same in every lane.
__device__ inline double sum_blocks(const double* parts, int64_t blocks) {
  double sum = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += 32) sum += parts[b];
  return cg::reduce(cg::tiled_partition<32>(cg::this_thread_block()), sum, cg::plus<double>());
}

// The small state of client k that a solve needs.
struct Products {
  int64_t n, m;
  double* gram;           // (n, m (2m + 1))
  double* along;          // (n, 2m + 2)
  float* factors;         // (n, 2m + 2)
  Status* status;         // (n)
  const int64_t* pairs;   // (n)
  const int64_t* oldest;  // (n)
  const bool* seen;       // (n)
  double trust;
};

// One warp: from the products of client k to the factors of its next estimate.
__device__ inline void solve_client(const Products& p, int64_t k, double* shared) {
  const int64_t m = p.m, rows = 2 * m;
  double* gram = shared;                    // (products_of(m)): in the order of age, as math/lbfgs.h wants it
  double* scratch = gram + products_of(m);  // (scratch_of(m))
  double* out = scratch + scratch_of(m);    // (2m + 1)
  const double* slots = p.gram + k * packed(rows, 0);  // in the order of slots
  const double* along = p.along + k * (rows + 2);
  const int64_t pairs = p.pairs[k], oldest = p.oldest[k];
  const auto slot_of = [&](int64_t row) {  // of the row-th in age: y's first, then s's
    return row < pairs ? (oldest + row) % m : m + (oldest + row - pairs) % m;
  };
  for (int64_t row = threadIdx.x; row < 2 * pairs; row += 32) {
    for (int64_t column = 0; column <= row; ++column) {
      gram[packed(row, column)] = slots[packed(slot_of(row), slot_of(column))];
    }
    gram[packed(2 * pairs, row)] = along[slot_of(row)];
  }
  if (threadIdx.x == 0) {
    gram[packed(2 * pairs, 2 * pairs)] = along[rows];
    gram[packed(2 * pairs + 1, 0)] = along[rows + 1];
  }
  __syncwarp();
  const Status status = p.seen[k] ? coefficients(WarpTeam(), gram, pairs, p.trust, scratch, out) : Status::kAbsent;
  __syncwarp();
  float* factors = p.factors + k * (rows + 2);
  for (int64_t j = threadIdx.x; j <= rows; j += 32) factors[j] = 0;
  __syncwarp();
  if (is_corrected(status)) {
    for (int64_t row = threadIdx.x; row < 2 * pairs; row += 32) factors[slot_of(row)] = static_cast<float>(out[row]);
    if (threadIdx.x == 0) factors[rows] = static_cast<float>(out[2 * pairs]);
  }
  if (threadIdx.x == 0) p.status[k] = status;
}

static __global__ void refresh_kernel(Products p) {
  extern __shared__ double shared[];
  solve_client(p, blockIdx.x, shared);
}

// One warp per client: bring its products up to date, then solve.
static __global__ void solve_kernel(Round r) {
  extern __shared__ double shared[];
  const int64_t k = blockIdx.x, rows = 2 * r.m, F = rows + 1;
  double* gram = r.gram + k * packed(rows, 0);
  double* along = r.along + k * (rows + 2);
  const Verdict v = *r.verdict;
  const bool fresh = k == r.client && v.stored;
  const double* extra = r.changes + r.n * F * r.pass_blocks;
  const double step_square = sum_blocks(extra + 2 * rows * r.pass_blocks, r.pass_blocks);
  for (int64_t j = 0; j < F; ++j) {
    const double change = sum_blocks(r.changes + (k * F + j) * r.pass_blocks, r.pass_blocks);
    if (threadIdx.x != 0) continue;
    if (fresh) {
      along[j] = change;
    } else {
      along[j] += j < rows ? change : 2 * change + step_square;
    }
  }
  if (fresh && v.pushed) {
    for (int64_t j = 0; j < rows; ++j) {
      const double with_s = sum_blocks(extra + j * r.pass_blocks, r.pass_blocks);
      const double with_y = sum_blocks(extra + (rows + j) * r.pass_blocks, r.pass_blocks);
      if (threadIdx.x != 0) continue;
      gram[packed(r.m + v.slot, j)] = with_s;
      gram[packed(v.slot, j)] = with_y;
    }
  }
  if (fresh && threadIdx.x == 0) {
    along[rows + 1] = v.g_square;
    r.seen[k] = true;
  }
  __syncwarp();
  solve_client({r.n, r.m, r.gram, r.along, r.factors, r.status, r.pairs, r.oldest, r.seen, r.trust}, k, shared);
}

}  // namespace secureafl::cuda
