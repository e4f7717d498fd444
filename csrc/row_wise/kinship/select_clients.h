#pragma once

#include <math.h>

#include <cstdint>

#include "common/host_device.h"
#include "row_wise/kinship/similarity.h"
#include "row_wise/kinship/table.h"

// Which clients take part in the mean. All results are flags in table.flags.

namespace secureafl::SECUREAFL_KIND {

// shared_results (6) is scratch. One long function: cut into three, the compiler generates other code for
// kin_choose_kernel.
template <typename Team>
SECUREAFL_FN void select_clients(const Team& team, const KinRound& r, const Table& table, double* shared_results) {
  const int n = static_cast<int>(r.n);
  const Bounds& b = r.bounds;
  // Counts the kin of each known client: known clients whose cosine with it exceeds a bound. Once from the origin
  // (table.values), once from the center (table.centered_kin). +inf for clients that take no part.
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    table.lengths[k] = sqrt(fmax(r.means[k * r.n + k], 0.0));
    if (table.flags[k] && is_known(r, k)) table.flags[k] |= Table::kKnown;
  }
  const double square = distances_to_center(team, r, table, shared_results);
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double* means = r.means + i * r.n;
    const double length = table.lengths[i], off = square - table.center_product[i],
                 center_distance = table.center_distance[i];
    int kin = 0, centered = 0;
    for (int k = team.across(); k < n && (table.flags[i] & Table::kKnown); k += Team::kAcross) {
      const bool other = k != i && (table.flags[k] & Table::kKnown);
      kin += other && means[k] > b.kin * fmax(length * table.lengths[k], b.least);
      centered += other && means[k] - table.center_product[k] + off >
                               b.kin * fmax(center_distance * table.center_distance[k], b.least_apart);
    }
    kin = team.sum_across(kin);
    centered = team.sum_across(centered);
    if (team.across() != 0) continue;
    table.values[i] = table.flags[i] ? 1 + kin : INFINITY;
    table.centered_kin[i] = table.flags[i] ? 1 + centered : INFINITY;
  }
  team.sync();

  // Drops clients whose group of kin is larger than the bound: `crowd` times the median group. The groups seen from the
  // center count only if at least half of the clients remain: attackers are fewer than half.
  const double max_kin = b.crowd * median_of(team, table.values, n, shared_results);
  const double max_centered = b.crowd * median_of(team, table.centered_kin, n, shared_results + 2);
  int balance = 0;  // 2 for each client that both groups keep, -1 for each one that takes part
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (!table.flags[k]) continue;
    const bool kept = !(table.values[k] > max_kin), both = kept && !(table.centered_kin[k] > max_centered);
    table.flags[k] |= (kept ? Table::kKept : 0) | (both ? Table::kBoth : 0);
    balance += 2 * both - 1;
  }
  const int64_t all = total(team, balance, table);
  if (team.rank() == 0) shared_results[4] = static_cast<double>(all);
  team.sync();
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    if (shared_results[4] >= 0 && !(table.flags[k] & Table::kBoth)) table.flags[k] &= ~Table::kKept;
  }
  team.sync();

  // Drops known clients whose mean update opposes the sum of the kept ones.
  SECUREAFL_NO_UNROLL
  for (int i = team.down(); i < n; i += Team::kDown) {
    const double* means = r.means + i * r.n;
    double pull = 0;
    for (int k = team.across(); k < n && (table.flags[i] & Table::kKept); k += Team::kAcross) {
      pull += table.flags[k] & Table::kKept ? means[k] : 0;
    }
    pull = team.sum_across(pull);
    if (team.across() == 0) table.values[i] = pull;  // 0 for clients that are not kept
  }
  team.sync();
  if (team.down() == 0) {
    double sum = 0;
    for (int k = team.across(); k < n; k += Team::kAcross) sum += table.values[k];
    sum = team.sum_across(sum);
    if (team.across() == 0) shared_results[5] = sqrt(fmax(sum, 0.0));
  }
  team.sync();
  SECUREAFL_NO_UNROLL
  for (int k = team.rank(); k < n; k += Team::kSize) {
    const double least = b.turned * fmax(table.lengths[k] * shared_results[5], b.least_sum);
    if ((table.flags[k] & Table::kKnown) && table.values[k] < least) table.flags[k] &= ~Table::kKept;
  }
  team.sync();
}

}  // namespace secureafl::SECUREAFL_KIND
