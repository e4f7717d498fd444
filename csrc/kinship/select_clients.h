#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "kinship/similarity.h"
#include "kinship/table.h"

// Which clients take part in the mean. All results are flags in table.is.

namespace secureafl::SECUREAFL_KIND {

// Counts each known client's kin: known clients whose cosine with it exceeds a bound. Once from the origin
// (table.values), once from the centre (table.apart). +inf for clients that take no part.
template <typename Team>
SECUREAFL_FN void count_kin(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  const Bounds& b = r.bounds;
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    table.lengths[k] = sqrt(fmax(r.means[k * r.n + k], 0.0));
    if (table.is[k] && is_known(r, k)) table.is[k] |= Table::kKnown;
  }
  const double square = look_from_centre(team, r, table, found);
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double* means = r.means + i * r.n;
    const double length = table.lengths[i], off = square - table.reach[i], far = table.far[i];
    int kin = 0, apart = 0;
    for (int k = team.across(); k < n && (table.is[i] & Table::kKnown); k += Team::kAcross) {
      const bool other = k != i && (table.is[k] & Table::kKnown);
      kin += other && means[k] > b.kin * fmax(length * table.lengths[k], b.least);
      apart += other && means[k] - table.reach[k] + off > b.kin * fmax(far * table.far[k], b.least_apart);
    }
    kin = team.sum_across(kin);
    apart = team.sum_across(apart);
    if (team.across() != 0) continue;
    table.values[i] = table.is[i] ? 1 + kin : INFINITY;
    table.apart[i] = table.is[i] ? 1 + apart : INFINITY;
  }
  team.sync();
}

// Drops clients whose group of kin is larger than the bound: `crowd` times the median group. The groups seen from the
// centre count only if at least half of the clients remain: attackers are fewer than half. found (5) is scratch.
template <typename Team>
SECUREAFL_FN void drop_crowds(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  const double most = r.bounds.crowd * median_of(team, table.values, n, found);
  const double most_apart = r.bounds.crowd * median_of(team, table.apart, n, found + 2);
  int balance = 0;  // 2 for each client that both groups keep, -1 for each one that takes part
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (!table.is[k]) continue;
    const bool kept = !(table.values[k] > most), both = kept && !(table.apart[k] > most_apart);
    table.is[k] |= (kept ? Table::kKept : 0) | (both ? Table::kBoth : 0);
    balance += 2 * both - 1;
  }
  const int64_t all = total(team, balance, table);
  if (team.rank() == 0) found[4] = static_cast<double>(all);
  team.sync();
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (found[4] >= 0 && !(table.is[k] & Table::kBoth)) table.is[k] &= ~Table::kKept;
  }
  team.sync();
}

// Drops known clients whose mean update opposes the sum of the kept ones. found (1) is scratch.
template <typename Team>
SECUREAFL_FN void drop_opposed(const Team& team, const Kin& r, const Table& table, double* found) {
  const int n = static_cast<int>(r.n);
  SECUREAFL_ROLLED
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double* means = r.means + i * r.n;
    double pull = 0;
    for (int k = team.across(); k < n && (table.is[i] & Table::kKept); k += Team::kAcross) {
      pull += table.is[k] & Table::kKept ? means[k] : 0;
    }
    pull = team.sum_across(pull);
    if (team.across() == 0) table.values[i] = pull;  // 0 for clients that are not kept
  }
  team.sync();
  if (team.down() == 0) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += table.values[k];
    sum = team.sum_across(sum);
    if (team.across() == 0) *found = sqrt(fmax(sum, 0.0));
  }
  team.sync();
  SECUREAFL_ROLLED
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double least = r.bounds.turned * fmax(table.lengths[k] * *found, r.bounds.least_sum);
    if ((table.is[k] & Table::kKnown) && table.values[k] < least) table.is[k] &= ~Table::kKept;
  }
  team.sync();
}

// found (6) is scratch.
template <typename Team>
SECUREAFL_FN void select_clients(const Team& team, const Kin& r, const Table& table, double* found) {
  count_kin(team, r, table, found);
  drop_crowds(team, r, table, found);
  drop_opposed(team, r, table, found + 5);
}

}  // namespace secureafl::SECUREAFL_KIND
