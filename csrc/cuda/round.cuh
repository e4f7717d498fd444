#pragma once

#include <cstdint>

#include "../math/lbfgs.h"
#include "../math/rank.h"
#include "../math/verdict.h"

// A whole server round in three kernels and one pass over the history.
//   judge.cuh   sums over the update -> verdict; the last block to finish decides
//   pass.cuh    estimates, rule, step; what the next round's right-hand sides change by; the client's new row
//   solve.cuh   per client: those changes summed, Gram matrix kept up to date -> factors for the next round
//
// The history lies coordinate by coordinate, (d, n, 2m + 2): y_0.., s_0.., w, g of each client side by side, so that a
// coordinate's estimates are made, ranked and multiplied by the step without leaving registers, and a client's row
// of the default m = 3 is one 32-byte sector.
// Pairs lie in ring slots: client k's j-th oldest is in slot (oldest[k] + j) % m.

namespace secureafl::cuda {

struct Verdict {
  Reason reason;
  bool received;  // the update takes part in the rule
  bool stored;    // it becomes the client's last
  bool pushed;    // its pair goes into `slot`
  int32_t slot;
  float clip;       // first contact: what g is multiplied by
  double g_square;  // |g|^2 after that
};

struct Round {
  // settings
  double lr, quantile, max_norm, trust;
  Rule rule;
  int64_t trim;
  bool filter, estimate, receive, store_all;
  // this round
  const float* update;  // (d)
  int64_t client;
  const float* trained_on;  // (d)
  const float* model;       // (d)
  float* next_model;        // (d)
  // state
  int64_t n, m, d, room;
  float* history;        // (d, n, 2m + 2)
  double* gram;          // (n, 2m (2m + 1) / 2): y and s slots, lower triangle
  double* along;         // (n, 2m + 2): y.x and s.x per slot, x.x, g.g, with x = model - w
  float* factors;        // (n, 2m + 2): of y, s, x, and a place left free
  Status* status;        // (n)
  int64_t* pairs;        // (n)
  int64_t* oldest;       // (n)
  bool* seen;            // (n)
  double* seen_factors;  // (room), unused: inf
  int64_t* recorded;     // ()
  int64_t* counts;       // (5): accepted, rejected, non_finite, capped, fallbacks
  // results and scratch
  bool* accepted;     // ()
  double* factor;     // ()
  Reason* reason;     // ()
  Verdict* verdict;   // ()
  unsigned* arrived;  // ()
  double* judged;     // (kSums, judge blocks)
  double* changes;    // see changes_of
  int64_t pass_blocks;
};

constexpr int kRoundThreads = 256;
constexpr int64_t kJudgeBlocks = 264;

// What the pass leaves for solve_kernel, per block: for each client k the products y.v, s.v, x.v with v the step of the
// model (n, 2m + 1, blocks); for the arriving client s.u and y.u with its new pair (s, y) and every slot u
// (4m, blocks); and v.v (blocks).
SECUREAFL_BOTH int64_t changes_of(int64_t n, int64_t m, int64_t blocks) {
  return (n * (2 * m + 1) + 4 * m + 1) * blocks;
}

}  // namespace secureafl::cuda
