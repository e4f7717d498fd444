#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "lbfgs/lbfgs.h"
#include "round/client.h"

namespace secureafl::SECUREAFL_KIND {

// Counter for the correction of client k in this round (capped or fallback), or nullptr. Call it before the next
// correction is solved.
SECUREAFL_FN int64_t* counted_at(const Round& r, const Verdict& v, int64_t k) {
  if (k == v.client || !r.takes_part(k, v)) return nullptr;
  return r.status[k] == Status::kCapped ? r.counts + 3 : r.status[k] == Status::kFallback ? r.counts + 4 : nullptr;
}

// The products of a client, in the history or in a copy of it.
struct ClientProducts {
  double* gram;         // (m (2m + 1)): y and s slots, lower triangle
  double* along;        // (2m + 2): y.x and s.x per slot, x.x, g.g
  const float* scales;  // (2m)
  int32_t pairs, oldest;
  bool seen;
};

SECUREAFL_FN ClientProducts client_products(const Round& r, int64_t k) {
  const int rows = static_cast<int>(r.planes());
  return {r.gram + k * packed(rows, 0),
          r.along + k * (rows + 2),
          r.scales + k * rows,
          pairs_of(r, k),
          oldest_of(r, k),
          r.seen[k]};
}

// Number of doubles of scratch that `solve_client` needs.
SECUREAFL_BOTH int solve_scratch(int m) { return products_of(m) + scratch_of(m) + rows_of(m); }

// From the products of client k to the factors of its next estimate.
template <typename Team>
SECUREAFL_FN void solve_client(const Team& team, const Round& r, int64_t k, const ClientProducts& products,
                               double* shared) {
  const int m = static_cast<int>(r.m), rows = 2 * m;
  double* gram = shared;                                         // (products_of(m)): ordered by age, as lbfgs.h expects
  double* scratch = gram + products_of(m);                       // (scratch_of(m))
  double* out = scratch + scratch_of(m);                         // (2m + 1)
  const double *slots = products.gram, *along = products.along;  // ordered by slot
  const int pairs = products.pairs, oldest = products.oldest;
  const auto slot_of = [&](int row) {  // slot of the row-th oldest: all y, then all s
    const int age = oldest + (row < pairs ? row : row - pairs);
    return (row < pairs ? 0 : m) + (age < m ? age : age - m);
  };
  SECUREAFL_NO_UNROLL
  for (int row = team.down(); row <= 2 * pairs; row += Team::kDown) {
    SECUREAFL_NO_UNROLL
    for (int column = team.across(); column <= row && column < 2 * pairs; column += Team::kAcross) {
      const int slot = slot_of(column);
      gram[packed(row, column)] = row < 2 * pairs ? slots[packed(slot_of(row), slot)] : along[slot];
    }
  }
  if (team.rank() == 0) {
    gram[packed(2 * pairs, 2 * pairs)] = along[rows];
    gram[packed(2 * pairs + 1, 0)] = along[rows + 1];
  }
  team.sync();
  const Status status =
      products.seen ? coefficients(team, gram, pairs, r.trust, kFloatRounding, scratch, out) : Status::kAbsent;
  team.sync();
  float* factors = r.factors + k * (rows + 2);
  SECUREAFL_NO_UNROLL
  for (int j = team.rank(); j <= rows; j += Team::kSize) factors[j] = 0;
  team.sync();
  if (is_corrected(status)) {
    SECUREAFL_NO_UNROLL
    for (int row = team.rank(); row < 2 * pairs; row += Team::kSize) {
      const int slot = slot_of(row);
      factors[slot] = static_cast<float>(out[row] * products.scales[slot]);
    }
    if (team.rank() == 0) factors[rows] = static_cast<float>(out[2 * pairs]);
  }
  if (team.rank() == 0) r.status[k] = status;
}

// Updates the products of client k by the sums of the pass. with_step (2m + 1): the step times its slots and its x.
// own: the sums from PassSums::own_x(0) on.
template <typename Team>
SECUREAFL_FN void renew_products(const Team& team, const Round& r, const Verdict& v, int64_t k,
                                 const ClientProducts& products, const double* with_step, const double* own) {
  const int m = static_cast<int>(r.m), rows = 2 * m, slot = static_cast<int>(clamped(v.slot, 0, m - 1));
  double *gram = products.gram, *along = products.along;
  const bool fresh = k == v.client && v.stored;
  const double *own_s = own + rows + 1, *own_y = own_s + rows, step_square = own_y[rows];
  SECUREAFL_NO_UNROLL
  for (int j = team.rank(); j < rows; j += Team::kSize) {
    const double scale = products.scales[j];
    along[j] = fresh ? scale * own[j] : along[j] + scale * with_step[j];
    if (!fresh || !v.pushed) continue;
    gram[packed(m + slot, j)] = scale * v.s_scale * own_s[j];
    if (j != m + slot) gram[packed(slot, j)] = scale * v.y_scale * own_y[j];  // y.s is already stored
  }
  if (team.rank() == 0) {
    along[rows] = fresh ? own[rows] : along[rows] + 2 * with_step[rows] + step_square;
    if (fresh) along[rows + 1] = v.g_square;
  }
  team.sync();
}

}  // namespace secureafl::SECUREAFL_KIND
