#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "coordinate_wise/rank.h"
#include "lbfgs/lbfgs.h"
#include "round/presence.h"
#include "round/verdict.h"

// A server round (docs/algorithm.md) in one pass over the history, in three steps that both devices share:
//   judge   sums over the update -> verdict                                                       (judge.h, quantile.h)
//   pass    per coordinate: estimates, rule, step; products of all rows with the step; the new row of the client
//   renew   per client: updates the products by these sums -> factors of the next round             (renew.h)
// A GPU renews in the next round, overlapped with its judge. Until then the verdict is pending, and the sums of the
// pass are kept in `changes`. Before anything else reads the factors or the products, `settle_` renews at once.
//
// The history is stored in tiles of C coordinates, each tile contiguous:
//   slots (tiles, 2m, n, C)   y_0 .., s_0 ..   float32, or float16 times `scales`
//   last  (tiles, 2, n, C)    w, g             float32
// Pairs are stored in a ring: the j-th oldest pair of client k is in slot (oldest[k] + j) % m. Coordinates past d are
// zero.
//
// Without pairs (m = 0) the estimate of a client is g. Nothing is carried from round to round, so there is no renew:
// scales, gram, along, factors and status are neither read nor written.

namespace secureafl::SECUREAFL_KIND {

constexpr double kMaxSquare = 1e300;  // MAX_SQUARE of row_rules.py: a longer last update is excluded

struct Verdict {
  int32_t client;  // sender of the update
  Reason reason;
  bool received;  // the update takes part in the rule: accepted, and its client counts
  bool steps;     // the model takes a step
  bool stored;    // the update replaces the last one of the client
  bool pushed;    // its pair is stored in `slot`
  int32_t slot;
  float clip;              // factor of g at first contact, to bound its norm; else 1
  int32_t pending;         // not 0: the clients are not yet renewed by the sums of this round
  double g_square;         // |g|^2 after clipping
  double rate;             // the step size of this round
  float y_scale, s_scale;  // scales of the stored pair; powers of two
  double last_rate;        // the step size of the round before: part of the starting guess for the search in the pass

  // A rejected update that is neither stored nor answered by a step: the pass has nothing to do.
  SECUREAFL_BOTH bool changes_nothing() const { return !steps && !stored; }
};

struct Round {
  // settings
  double lr, quantile, max_norm, trust;
  Rule rule;
  int64_t trim;
  bool filter, estimate, receive, store_all;
  bool hold;  // the model takes no step if the update is rejected
  // this round
  const float* update;      // (d)
  const float* trained_on;  // (d)
  const float* model;       // (d)
  const float* previous;    // (d): the model before `model`: for the starting guess of the search; any values will do
  float* next_model;        // (d)
  const int64_t* client;    // (): on the device, so that one captured graph works for any client
  bool backwards;  // process tiles in reverse order: the last tiles of the previous round are still in the cache
  // state
  int64_t n, m, d, tiles, columns;
  int64_t lists, room;   // of Q: lists is 1 (all clients together) or n; room: factors per list
  bool half;             // slots are float16
  void* slots;           // (tiles, 2m, n, columns)
  float* last;           // (tiles, 2, n, columns)
  float* scales;         // (n, 2m): factor of the stored values of a slot; 1 for float32
  double* gram;          // (n, m (2m + 1)): y and s slots, lower triangle
  double* along;         // (n, 2m + 2): y.x and s.x per slot, x.x, g.g, with x = model - w
  float* factors;        // (n, 2m + 2): of y and s as stored, of x, and one unused
  Status* status;        // (n)
  int64_t* pairs;        // (n)
  int64_t* oldest;       // (n)
  bool* seen;            // (n)
  Presence presence;     // which clients count
  double* seen_factors;  // (lists, room): each list is a ring buffer
  int64_t* recorded;     // (lists): number of factors ever stored in each
  int64_t* counts;       // (5): accepted, rejected, non_finite, capped, fallbacks
  // (4): barrier counters: blocks that have judged; rounds done; blocks that have renewed clients, in even rounds and
  // in odd ones. All but the rounds are zero when the round that uses them begins.
  unsigned* arrived;
  // (1 + kKeyRows, kKeysPerRow): counts of the factors that a full list has no room for (factor_counts.h). Null: a full
  // list is overwritten.
  int64_t* factor_counts;
  // results
  bool* accepted;  // ()
  double* factor;  // ()
  Reason* reason;  // ()

  SECUREAFL_BOTH int64_t planes() const { return 2 * m; }
  // True if row k takes part in the rule.
  SECUREAFL_FN bool takes_part(int64_t k, const Verdict& v) const {
    return k == v.client ? v.received : estimate && presence.counts(seen[k], k);
  }
};

// Layout of the sums of a pass with pairs, over all coordinates: the step v times every slot (as stored) and every x.
// Then, if the row of the client is new: its own slots times its new x, s and y, as stored. Last, v.v.
struct PassSums {
  int64_t n, m;

  SECUREAFL_BOTH int64_t slot(int64_t j, int64_t k) const { return j * n + k; }
  SECUREAFL_BOTH int64_t x(int64_t k) const { return 2 * m * n + k; }
  SECUREAFL_BOTH int64_t own_x(int64_t j) const { return (2 * m + 1) * n + j; }  // j = 2m: x.x
  SECUREAFL_BOTH int64_t own_s(int64_t j) const { return own_x(2 * m + 1) + j; }
  SECUREAFL_BOTH int64_t own_y(int64_t j) const { return own_s(2 * m) + j; }
  SECUREAFL_BOTH int64_t step_square() const { return own_y(2 * m); }
  SECUREAFL_BOTH int64_t count() const { return step_square() + 1; }
};

// Number of sums of a pass.
inline int64_t pass_sums(int64_t n, int64_t m) { return m == 0 ? 0 : PassSums{n, m}.count(); }

}  // namespace secureafl::SECUREAFL_KIND
