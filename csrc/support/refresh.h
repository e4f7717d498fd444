#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "kinship/table.h"
#include "support/eigen.h"
#include "support/support.h"

namespace secureafl::SECUREAFL_KIND {

// for (at in 0 .. n * n - 1) each(at, row, column), shared by the team
template <typename Team, typename Each>
SECUREAFL_FN void for_entries(const Team& team, int n, const Each& each) {
  SECUREAFL_NO_UNROLL
  for (int at = team.rank(); at < n * n; at += Team::kSize) each(at, at / n, at % n);
  team.sync();
}

// The level of a matrix: the median over the clients of (A^2)_kk / A_kk, about the eigenvalue that a usual client takes
// part in. `centred`: of the matrix minus its mean row and column.
template <typename Team>
SECUREAFL_FN double level_of(const Team& team, const Refresh& r, const RefreshTables& t, const double* matrix,
                             bool centred, int count) {
  const int n = static_cast<int>(r.n);
  double* row_means = t.rotations;  // (n)
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    double sum = 0;
    for (int k = team.across(); k < n && centred; k += Team::kAcross) sum += matrix[i * n + k];
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

// The value of this rank among values (n), 0 is the least. found (1) is scratch.
template <typename Team>
SECUREAFL_FN double value_of_rank(const Team& team, const double* values, int n, int rank, double* found) {
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    int below = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      below += values[k] < values[i] || (values[k] == values[i] && k < i);
    }
    below = team.sum_across(below);
    if (team.across() == 0 && below == rank) *found = values[i];
  }
  team.sync();
  return *found;
}

constexpr double kNormal = 1.4826, kLeast = 1e-3;  // NORMAL and LEAST_SPREAD of support.py

// kept (n) *= the share of its weight that a client keeps by how far its residual reaches along the directions with
// values (n) above 0: vectors (n, n) are the eigenvectors of the residuals' inner products. The side of a direction
// with the attackers' honest kin counts less, the more one-sided the direction is.
template <typename Team>
SECUREAFL_FN void judge_distances(const Team& team, const Refresh& r, const RefreshTables& t) {
  const int n = static_cast<int>(r.n);
  double *lengths = t.offsets, *one_sided = t.rotations, *reach = t.rotations + n;  // (n) each
  const auto loading = [&](int k, int j) { return sqrt(t.values[j]) * t.vectors[k * n + j]; };
  SECUREAFL_NO_UNROLL
  for (int j = team.down(); j < n; j += Team::kDown) {
    double sum = 0, all = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) {
      const double value = loading(k, j), cube = value * value * value;
      sum += cube;
      all += fabs(cube);
    }
    sum = team.sum_across(sum);
    all = team.sum_across(all);
    if (team.across() == 0) one_sided[j] = all > 0 ? sum / all : 0;
  }
  team.sync();
  SECUREAFL_NO_UNROLL
  for (int k = team.down(); k < n; k += Team::kDown) {
    double square = 0, counted = 0;
    for (int j = team.across(); j < n; j += Team::kAcross) {
      const double value = loading(k, j), other_side = fmax(1 - 2 * fabs(one_sided[j]), 0.0);
      square += value * value;
      counted += value * value * (value * one_sided[j] >= 0 ? 1 : other_side);
    }
    square = team.sum_across(square);
    counted = team.sum_across(counted);
    if (team.across() != 0) continue;
    lengths[k] = r.counts[k] ? sqrt(square) : INFINITY;
    reach[k] = sqrt(counted);
  }
  team.sync();
  const double usual = median_of(team, lengths, n, t.parts);
  double* away = one_sided;  // not used any more
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) away[k] = fabs(lengths[k] - usual);
  team.sync();
  const double spread = kNormal * median_of(team, away, n, t.parts) + kLeast;
  const SupportBounds& b = r.bounds;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double far = (reach[k] - usual) / spread;
    t.kept[k] *= fmin(fmax((b.apart_end - far) / (b.apart_end - b.apart), 0.0), 1.0);
  }
  team.sync();
}

// Median of the loadings along direction j of the clients that count: |loading - centre| if `spread`. Every lane of a
// row of the team gets it.
template <typename Team>
SECUREAFL_FN double median_loading(const Team& team, const Refresh& r, const RefreshTables& t, int j, double centre,
                                   bool spread, int count) {
  const int n = static_cast<int>(r.n);
  const auto value_of = [&](int k) { return spread ? fabs(t.loadings[k * n + j] - centre) : t.loadings[k * n + j]; };
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
    const double centre = median_loading(team, r, t, j, 0, false, count);
    const double spread = kNormal * median_loading(team, r, t, j, centre, true, count) + kLeast;
    double weighed = 0, weights = 0, all = 0;
    SECUREAFL_NO_UNROLL
    for (int k = team.across(); k < n; k += Team::kAcross) {
      if (!r.counts[k]) continue;
      const double value = t.loadings[k * n + j], away = (value - centre) / (r.bounds.cut * spread);
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

// One stage: cuts the directions whose eigenvalue in (maps rest maps^T) exceeds `least`. maps: (n, n), what makes
// residuals; or null for I
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

// How similar two clients are in `rest`, 0 to 1, or how opposed, 0 to -1; 0 of a client with itself.
SECUREAFL_FN double signed_kin(const Refresh& r, const RefreshTables& t, int i, int k) {
  const int n = static_cast<int>(r.n);
  if (k == i || !r.counts[k] || !r.counts[i]) return 0;
  const auto length = [&](int one) { return sqrt(fmax(t.rest[one * n + one], r.bounds.short_square)); };
  const double cosine = t.rest[i * n + k] / (length(i) * length(k));
  const double weight = fmin(fmax((fabs(cosine) - r.bounds.kin) / (1 - r.bounds.kin), 0.0), 1.0);
  return cosine < 0 ? -weight : weight;
}

SECUREAFL_FN double kin_weight(const Refresh& r, const RefreshTables& t, int i, int k) {
  return fmax(signed_kin(r, t, i, k), 0.0);
}

// kept (n) *= the share of its weight that a client keeps by who opposes it. Clients that push back what others with
// the same data want have opponents and hardly any kin. The vote of a client counts by the share that it keeps.
template <typename Team>
SECUREAFL_FN void judge_opposed(const Team& team, const Refresh& r, const RefreshTables& t, double usual) {
  const int n = static_cast<int>(r.n);
  const SupportBounds& b = r.bounds;
  double *votes = t.values, *shares = t.offsets;  // (n) each
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < n; i += Team::kSize) votes[i] = r.counts[i] ? t.kept[i] : 0;
  team.sync();
  SECUREAFL_NO_UNROLL
  for (int pass = 0; pass < 2; ++pass) {  // the second time with fewer votes of those who are left out
    SECUREAFL_NO_UNROLL
    for (int i = team.down(); i < n; i += Team::kDown) {
      double sum = 0;
      for (int k = team.across(); k < n; k += Team::kAcross) sum += signed_kin(r, t, i, k) * votes[k];
      sum = team.sum_across(sum);
      if (team.across() != 0) continue;
      shares[i] = fmin(fmax((b.opposed_end + sum / usual) / (b.opposed_end - b.opposed), 0.0), 1.0);
    }
    team.sync();
    SECUREAFL_NO_UNROLL
    for (int i = team.rank(); i < n; i += Team::kSize) votes[i] = r.counts[i] ? t.kept[i] * shares[i] : 0;
    team.sync();
  }
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < n; i += Team::kSize) t.kept[i] = votes[i];
  team.sync();
}

// kept (n): the share of its weight that a client keeps. A group may be larger than the median size by a share of it,
// or by some spreads if the sizes differ more. The spread is taken from the lower half: attackers that form a large
// group are not in it.
template <typename Team>
SECUREAFL_FN void judge_groups(const Team& team, const Refresh& r, const RefreshTables& t, int count) {
  const int n = static_cast<int>(r.n);
  const SupportBounds& b = r.bounds;
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += kin_weight(r, t, i, k);
    sum = team.sum_across(sum);
    if (team.across() == 0) t.kept[i] = r.counts[i] ? 1 + sum : INFINITY;
  }
  team.sync();
  const double usual = median_of(team, t.kept, n, t.parts);
  const double quartile = value_of_rank(team, t.kept, n, (count - 1) / 4, t.parts + 2);
  const double largest = usual + fmax(b.group * usual, b.group_spreads * (usual - quartile));
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < n; i += Team::kSize) {
    const double size = t.kept[i], left = fmin(b.group_left * usual / size, 1.0);
    const double share = fmin(fmax((b.group_end - size / largest) / (b.group_end - 1), 0.0), 1.0);
    t.kept[i] = left + (1 - left) * share;
  }
  team.sync();
  judge_opposed(team, r, t, usual);
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
    r.shift[k] = 0;
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
  // A client that has lost most of its weight loses all of it: what is left would be an attacker's rest.
  double left = 0;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (!r.counts[k]) continue;
    const double weight = 1.0 / count + r.shift[k];
    const double share = t.kept[k] * fmin(fmax((weight * count - b.fade) / b.fade, 0.0), 1.0);
    t.values[k] = fmin(weight * share, b.most / count);
    left += t.values[k];
  }
  // What left-out clients lose the others gain: otherwise attackers slow the training.
  const double fill = fmin(fmax(1 / sum_all(team, left, t.parts), 1.0), b.fill);
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (r.counts[k]) r.shift[k] = fmin(t.values[k] * fill, b.most / count) - 1.0 / count;
  }
}

}  // namespace secureafl::SECUREAFL_KIND
