#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "lbfgs/lbfgs.h"
#include "round/verdict.h"
#include "rules/rank.h"

// A whole server round in one pass over the history (spec: section 4), in three steps that both devices share:
//   judge   sums over the update -> verdict
//   pass    per coordinate: estimates from the factors, rule, step; sums of all rows with it; the client's new row
//   renew   per client: products brought up to date by those sums -> factors for the next round
//
// The history lies in tiles of C coordinates, each tile one piece of memory:
//   slots (tiles, 2m, n, C)   y_0 .., s_0 ..   float32, or float16 to be multiplied by `scales`
//   last  (tiles, 2, n, C)    w, g             float32
// Pairs lie in ring slots: client k's j-th oldest is in slot (oldest[k] + j) % m. Coordinates past d are zeros.

namespace secureafl::SECUREAFL_KIND {

struct Verdict {
  int32_t client;  // whose update it is
  Reason reason;
  bool received;  // the update takes part in the rule
  bool steps;     // the model takes a step
  bool stored;    // it becomes the client's last
  bool pushed;    // its pair goes into `slot`
  int32_t slot;
  float clip;              // first contact: what g is multiplied by
  double g_square;         // |g|^2 after that
  float y_scale, s_scale;  // of the pair in its slot; powers of two
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
  const float* previous;    // (d): the model before that, or anything
  float* next_model;        // (d)
  const int64_t* client;    // (): on the device, so that one captured graph serves any client
  bool backwards;           // the order in which tiles are walked: what the last round read last is still in the cache
  // state
  int64_t n, m, d, tiles, columns;
  int64_t lists, room;   // of Q: one list of factors for all clients, or one for each
  bool half;             // slots are float16
  void* slots;           // (tiles, 2m, n, columns)
  float* last;           // (tiles, 2, n, columns)
  float* scales;         // (n, 2m): what a slot's values are multiplied by; 1 for float32
  double* gram;          // (n, m (2m + 1)): y and s slots, lower triangle
  double* along;         // (n, 2m + 2): y.x and s.x per slot, x.x, g.g, with x = model - w
  float* factors;        // (n, 2m + 2): of y, s as they are stored, of x, and a place left free
  Status* status;        // (n)
  int64_t* pairs;        // (n)
  int64_t* oldest;       // (n)
  bool* seen;            // (n)
  double* seen_factors;  // (lists, room): each list is a ring buffer
  int64_t* recorded;     // (lists): factors ever put into each
  int64_t* counts;       // (5): accepted, rejected, non_finite, capped, fallbacks
  unsigned* arrived;     // (): blocks of threads that have judged; zero between rounds
  // results
  bool* accepted;  // ()
  double* factor;  // ()
  Reason* reason;  // ()

  SECUREAFL_BOTH int64_t planes() const { return 2 * m; }
  // Whether row k takes part in the rule.
  SECUREAFL_FN bool wants(int64_t k, const Verdict& v) const {
    return k == v.client ? v.received : estimate && seen[k];
  }
};

// Where the sums of a pass lie: over all coordinates, of the step v with every slot as stored and with every x; then,
// if the client's row is new, of its own slots with its new x, s and y, as stored; and v.v.
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

}  // namespace secureafl::SECUREAFL_KIND
