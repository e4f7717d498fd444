#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/table.h"
#include "row_wise/support/eigen.h"
#include "row_wise/support/kept.h"
#include "row_wise/support/support.h"

namespace secureafl::SECUREAFL_KIND {

// for (at in 0 .. n * n - 1) each(at, row, column), shared by the team
template <typename Team, typename Each>
SECUREAFL_FN void for_entries(const Team& team, int n, const Each& each) {
  SECUREAFL_NO_UNROLL
  for (int at = team.rank(); at < n * n; at += Team::kSize) each(at, at / n, at % n);
  team.sync();
}

// The level of a matrix: the median over the clients of (A^2)_kk / A_kk, about the eigenvalue that a usual client takes
// part in. `centered`: of the matrix minus its mean row and column.
template <typename Team>
SECUREAFL_FN double level_of(const Team& team, const Refresh& r, const RefreshTables& t, const double* matrix,
                             bool centered, int count) {
  const int n = static_cast<int>(r.n);
  double* row_means = t.rotations;  // (n)
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    double sum = 0;
    for (int k = team.across(); k < n && centered; k += Team::kAcross) sum += matrix[i * n + k];
    sum = team.sum_across(sum);
    if (team.across() == 0) row_means[i] = sum / count;
  }
  team.sync();
  double all = 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) all += row_means[k];
  all = sum_all(team, all, t.parts) / count;
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    double square = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      const double entry = matrix[i * n + k] - row_means[i] - row_means[k] + all;
      if (r.counts[k]) square += entry * entry;
    }
    square = team.sum_across(square);
    const double own = matrix[i * n + i] - 2 * row_means[i] + all;
    if (team.across() == 0) t.values[i] = r.counts[i] ? square / fmax(own, r.bounds.short_level) : INFINITY;
  }
  team.sync();
  return median_of(team, t.values, n, t.parts);
}

// Median of the loadings along direction j of the clients that count: |loading - center| if `spread`. Every lane of a
// row of the team gets it.
template <typename Team>
SECUREAFL_FN double median_loading(const Team& team, const Refresh& r, const RefreshTables& t, int j, double center,
                                   bool spread, int count) {
  const int n = static_cast<int>(r.n);
  const auto value_of = [&](int k) { return spread ? fabs(t.loadings[k * n + j] - center) : t.loadings[k * n + j]; };
  double sum = 0;  // of the two in the middle, or twice the one
  SECUREAFL_NO_UNROLL
  for (int i = team.across(); i < n; i += Team::kAcross) {
    if (!r.counts[i]) continue;
    const double value = value_of(i);
    int below = 0;
    for (int k = 0; k < n; ++k) below += r.counts[k] && (value_of(k) < value || (value_of(k) == value && k < i));
    sum += (below == (count - 1) / 2 ? value : 0) + (below == count / 2 ? value : 0);
  }
  return team.sum_across(sum) / 2;
}

// offsets (n): of every direction a robust mean of the clients' loadings minus their mean. Tukey's biweight about the
// median: a client that is `cut` spreads away has no weight. A trimmed mean would move towards attackers on one side.
template <typename Team>
SECUREAFL_FN void offsets_of(const Team& team, const Refresh& r, const RefreshTables& t, int count) {
  const int n = static_cast<int>(r.n);
  SECUREAFL_NO_UNROLL
  for (int j = team.down(); j < n; j += Team::kDown) {
    if (!(t.values[j] > 0)) {
      if (team.across() == 0) t.offsets[j] = 0;
      continue;
    }
    const double center = median_loading(team, r, t, j, 0, false, count);
    const double spread = kNormal * median_loading(team, r, t, j, center, true, count) + kLeast;
    double weighed = 0, weights = 0, all = 0;
    SECUREAFL_NO_UNROLL
    for (int k = team.across(); k < n; k += Team::kAcross) {
      if (!r.counts[k]) continue;
      const double value = t.loadings[k * n + j], away = (value - center) / (r.bounds.cut * spread);
      const double inside = fabs(away) < 1 ? 1 - away * away : 0, weight = inside * inside;
      weighed += weight * value;
      weights += weight;
      all += value;
    }
    weighed = team.sum_across(weighed);
    weights = team.sum_across(weights);
    all = team.sum_across(all);
    if (team.across() == 0) t.offsets[j] = weighed / weights - all / count;
  }
  team.sync();
}

// One stage: cuts the directions whose eigenvalue in (maps rest maps^T) exceeds `least`.
// maps (n, n): mean updates -> residuals; null: identity
template <typename Team>
SECUREAFL_FN void cut_directions(const Team& team, const Refresh& r, const RefreshTables& t, const double* maps,
                                 double* basis, double least, int count) {
  const int n = static_cast<int>(r.n);
  if (maps) {
    multiply<false>(team, maps, t.rest, t.work, n);
    for_entries(team, n, [&](int at, int i, int j) {
      double sum = 0;
      for (int k = 0; k < n; ++k) sum += t.work[i * n + k] * maps[j * n + k];
      t.along[at] = sum;
    });
  } else {
    for_entries(team, n, [&](int at, int, int) { t.along[at] = t.rest[at]; });
  }
  if (least < 0) least = fmax(r.bounds.odd_least, r.bounds.odd * level_of(team, r, t, t.along, false, count));
  for_entries(team, n, [&](int at, int, int) { t.vectors[at] = basis[at]; });
  diagonalise(team, t.along, least, t.vectors, t.matrix, t.work, t.rotations, t.parts, n);
  SECUREAFL_NO_UNROLL
  for (int j = team.rank(); j < n; j += Team::kSize) {
    const double value = t.matrix[j * n + j];
    t.values[j] = value > least ? value : 0;
  }
  team.sync();
  // Scaled to directions of length 1.
  for_entries(team, n, [&](int at, int, int j) {
    basis[at] = t.vectors[at];
    t.work[at] = t.values[j] > 0 ? t.vectors[at] / sqrt(t.values[j]) : 0;
  });
  if (maps) {
    judge_distances(team, r, t);
    multiply<true>(team, maps, t.work, t.along, n);
  } else {
    for_entries(team, n, [&](int at, int, int) { t.along[at] = t.work[at]; });
  }
  multiply<false>(team, t.rest, t.along, t.loadings, n);
  offsets_of(team, r, t, count);
  multiply<false>(team, t.remaining, t.along, t.work, n);
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    double sum = 0;
    for (int j = 0; j < n; ++j) sum += t.work[k * n + j] * t.offsets[j];
    r.shift[k] += r.counts[k] ? sum : 0;
  }
  for_entries(team, n, [&](int at, int i, int k) {
    double square = 0, part = 0;
    for (int j = 0; j < n; ++j) {
      square += t.loadings[i * n + j] * t.loadings[k * n + j];
      part += t.work[i * n + j] * t.loadings[k * n + j];
    }
    t.rest[at] -= square;
    t.remaining[at] -= part;
  });
}

// kin (n, n) = I - W: W has the weights of each client's kin, the clients with a cosine above the bound.
template <typename Team>
SECUREAFL_FN void subtract_kin(const Team& team, const Refresh& r, const RefreshTables& t) {
  const int n = static_cast<int>(r.n);
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      const double near = kin_weight(r, t, i, k);
      t.kin[i * n + k] = near;
      sum += near;
    }
    sum = team.sum_across(sum);
    for (int k = team.across(); k < n; k += Team::kAcross) {
      t.kin[i * n + k] = (k == i ? 1 : 0) - t.kin[i * n + k] / fmax(sum, r.bounds.few_kin);
    }
  }
  team.sync();
}

template <typename Team>
SECUREAFL_FN void refresh(const Team& team, const Refresh& r, const RefreshTables& t) {
  const int n = static_cast<int>(r.n);
  double counted = 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    counted += r.counts[k];
    // A client that does not count keeps a negative shift: otherwise it would win its weight back by silence.
    r.shift[k] = r.counts[k] ? 0 : fmin(r.shift[k], 0.0);
  }
  const int count = static_cast<int>(sum_all(team, counted, t.parts));
  if (count == 0) return;
  for_entries(team, n, [&](int at, int i, int k) {
    // Products of updates of norm 1 at most. Larger ones only come from a file, and could overflow.
    t.rest[at] = r.counts[i] && r.counts[k] ? fmin(fmax(r.means[at], -1.0), 1.0) : 0;
    t.remaining[at] = i == k;
  });
  judge_groups(team, r, t, count);
  const SupportBounds& b = r.bounds;
  const double crowd = fmax(b.crowd_least, b.crowd * level_of(team, r, t, t.rest, true, count));
  cut_directions(team, r, t, nullptr, r.basis, crowd, count);
  subtract_kin(team, r, t);
  cut_directions(team, r, t, t.kin, r.basis + r.n * r.n, -1, count);
  if (b.again > 0) cut_directions(team, r, t, nullptr, r.basis + 2 * r.n * r.n, crowd * b.again, count);
  // A client that has lost most of its weight loses all of it: the small rest would mostly be attackers'.
  double left = 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (!r.counts[k]) continue;
    const double weight = 1.0 / count + r.shift[k];
    const double share = t.kept[k] * fmin(fmax((weight * count - b.fade) / b.fade, 0.0), 1.0);
    t.values[k] = fmin(weight * share, b.most / count);
    left += t.values[k];
  }
  // The others gain the weight that left-out clients lose: otherwise attackers would slow the training.
  const double fill = fmin(fmax(1 / sum_all(team, left, t.parts), 1.0), b.fill);
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (r.counts[k]) r.shift[k] = fmin(t.values[k] * fill, b.most / count) - 1.0 / count;
  }
}

}  // namespace secureafl::SECUREAFL_KIND
