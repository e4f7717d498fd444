#pragma once

#include <math.h>

#include "common/host_device.h"
#include "row_wise/kinship/table.h"
#include "row_wise/support/support.h"

// The share of its weight that each client keeps in a refresh. It depends on the size of its group, on its opponents,
// and on its distance to its kin.

namespace secureafl::SECUREAFL_KIND {

constexpr double kNormal = 1.4826, kLeast = 1e-3;  // NORMAL and LEAST_SPREAD of support.py

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

// kept (n) *= the share of its weight that each client keeps despite its opponents. Clients that push against those
// with the same data have opponents and hardly any kin. The vote of a client counts by the share that it keeps.
// median_size: of the groups
template <typename Team>
SECUREAFL_FN void judge_opposed(const Team& team, const Refresh& r, const RefreshTables& t, double median_size) {
  const int n = static_cast<int>(r.n);
  const SupportBounds& b = r.bounds;
  double *votes = t.values, *shares = t.offsets;  // (n) each
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < n; i += Team::kSize) votes[i] = r.counts[i] ? t.kept[i] : 0;
  team.sync();
  SECUREAFL_NO_UNROLL
  for (int pass = 0; pass < 2; ++pass) {  // in the second pass votes of left-out clients count less
    SECUREAFL_NO_UNROLL
    for (int i = team.down(); i < n; i += Team::kDown) {
      double sum = 0;
      for (int k = team.across(); k < n; k += Team::kAcross) sum += signed_kin(r, t, i, k) * votes[k];
      sum = team.sum_across(sum);
      if (team.across() != 0) continue;
      shares[i] = fmin(fmax((b.opposed_end + sum / median_size) / (b.opposed_end - b.opposed), 0.0), 1.0);
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
// or by some spreads if the sizes differ more. A group of group_least of the clients is never too large. The spread is
// taken from the lower half: attackers that form a large group are not in it.
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
  const double median_size = median_of(team, t.kept, n, t.parts);
  const double quartile = value_of_rank(team, t.kept, n, (count - 1) / 4, t.parts + 2);
  const double more = fmax(b.group * median_size, b.group_spreads * (median_size - quartile));
  const double largest = fmax(median_size + more, b.group_least * count);
  SECUREAFL_NO_UNROLL
  for (int i = team.rank(); i < n; i += Team::kSize) {
    const double size = t.kept[i], left = fmin(b.group_left * median_size / size, 1.0);
    const double share = fmin(fmax((b.group_end - size / largest) / (b.group_end - 1), 0.0), 1.0);
    t.kept[i] = left + (1 - left) * share;
  }
  team.sync();
  judge_opposed(team, r, t, median_size);
}

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
  const double median_length = median_of(team, lengths, n, t.parts);
  double* away = one_sided;  // not used any more
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) away[k] = fabs(lengths[k] - median_length);
  team.sync();
  const double spread = kNormal * median_of(team, away, n, t.parts) + kLeast;
  const SupportBounds& b = r.bounds;
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double distance = (reach[k] - median_length) / spread;
    t.kept[k] *= fmin(fmax((b.apart_end - distance) / (b.apart_end - b.apart), 0.0), 1.0);
  }
  team.sync();
}

}  // namespace secureafl::SECUREAFL_KIND
